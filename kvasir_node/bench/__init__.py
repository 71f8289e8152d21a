"""Side-by-side benchmarks: what a swarm costs against one process, measured on one machine."""
