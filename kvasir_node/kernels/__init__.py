"""Kernels: what computes routed experts, one module a backend, all behind `port.ExpertKernel`."""
