"""What watches the program and takes statistics."""
