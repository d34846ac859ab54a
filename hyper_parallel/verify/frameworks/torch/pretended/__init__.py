"""Lets the CPU stand in for an accelerator: programs that name ``cuda`` or ``npu`` run unchanged on the host."""
