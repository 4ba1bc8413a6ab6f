"""What the benchmarks of the copies between a GPU and host memory share."""
