"""Device code for NVIDIA GPUs in CuTe DSL.

`config`, `tiles` and `pack` describe the step and lay out its data without cutlass; `build`
compiles kernels on a machine without a GPU; `load` runs what it built without cutlass. The other
modules are device code and import cutlass.
"""
