"""Imported by a fork server before the packages of a program: the CPU stands in for ``npu`` from then on."""

from hyper_parallel.verify.frameworks.torch.pretended.installation import install

__all__: list[str] = []

install("npu")
