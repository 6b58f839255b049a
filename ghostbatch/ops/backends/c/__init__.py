"""Ghost norm on a CPU, in C, compiled on first use."""
