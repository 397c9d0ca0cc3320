"""Frameworks: slime, XTuner, verl and Megatron-core on lazy tensors.

One thin module for each, with the few lines that its users change. None is imported by ``import tracefile``, and none
imports its framework before it is called.
"""
