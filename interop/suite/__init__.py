"""Interop scenarios between a userspace node and the Linux kernel."""
