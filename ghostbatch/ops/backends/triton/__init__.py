"""Ghost norm on an NVIDIA GPU, in Triton, which is imported when the first CUDA tensor arrives."""
