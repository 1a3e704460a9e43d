"""Domain parallelism for PyTorch: one sample split over several devices, through unmodified modules."""
