"""What differs between the ranks of a job: `ddpstats doctor`."""
