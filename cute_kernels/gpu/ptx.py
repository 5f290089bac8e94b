"""One line of PTX in a kernel: opaque to the compiler, and never moved past another."""

from cutlass.cute.arch.nvvm_wrappers import inline_ptx


def ptx_read(code, types, *args):
    out = inline_ptx(code, write_only_types=types, read_only_args=list(args))
    return list(out) if len(types) > 1 else out


def ptx_do(code, *args):
    inline_ptx(code, read_only_args=list(args))
