"""Certification: what a kernel's arithmetic is, measured on made-up experts, and what it is fit for."""
