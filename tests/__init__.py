"""Kvasir's tests; they mirror the packages. See docs/architecture.md for what each ring proves."""
