"""`ddpstats report`: what the ranks recorded, as text, JSON, a page to look at, and a trace for Perfetto."""
