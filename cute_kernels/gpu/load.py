"""Run built cubins through the CUDA driver API: no cutlass, no torch.

A CUDA context must be current on the calling thread (torch makes one with its first tensor).
"""

import ctypes
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any


class DriverError(RuntimeError):
    """A driver call failed; the message names the call and CUDA's error."""


def _ok(result: tuple, what: str) -> Any:
    err, *rest = result
    if int(err) != 0:
        raise DriverError(f"{what} failed: {err.name}")
    return rest[0] if len(rest) == 1 else rest


class Kernel:
    """A loaded kernel with the launch geometry of its manifest.

    manifest: grid, block, cluster, smem (bytes), entry, sha256 of the cubin. A cubin that does not
    match its manifest is refused.
    """

    def __init__(self, cubin: bytes, manifest: dict[str, Any]) -> None:
        import cuda.bindings.driver as cu

        if hashlib.sha256(cubin).hexdigest() != manifest["sha256"]:
            raise ValueError(f"the cubin of {manifest['what']} is not the one of its manifest")
        self._cu, self.manifest = cu, manifest
        library = _ok(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), "cuLibraryLoadData")
        kernel = _ok(
            cu.cuLibraryGetKernel(library, manifest["entry"].encode()), "cuLibraryGetKernel"
        )
        self._function = _ok(cu.cuKernelGetFunction(kernel), "cuKernelGetFunction")
        attribute = cu.CUfunction_attribute
        for name, value in (
            (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, manifest["smem"]),
            (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            (attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ):
            _ok(cu.cuFuncSetAttribute(self._function, name, value), "cuFuncSetAttribute")

    @classmethod
    def read(cls, path: pathlib.Path) -> "Kernel":
        """From `path`.cubin and `path`.json."""
        manifest, cubin = (path.with_name(path.name + e) for e in (".json", ".cubin"))
        return cls(cubin.read_bytes(), json.loads(manifest.read_text()))

    def _config(self, stream: int, cooperative: bool, dependent: bool) -> tuple[Any, list]:
        cu, m = self._cu, self.manifest
        attributes = []
        ident = cu.CUlaunchAttributeID
        if m["cluster"] > 1:
            a = cu.CUlaunchAttribute()
            a.id = ident.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = m["cluster"], 1, 1
            attributes.append(a)
        if cooperative:
            a = cu.CUlaunchAttribute()
            a.id = ident.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            a.value.cooperative = 1
            attributes.append(a)
        if dependent:
            a = cu.CUlaunchAttribute()
            a.id = ident.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            a.value.programmaticStreamSerializationAllowed = 1
            attributes.append(a)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = m["grid"], 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = m["block"], 1, 1
        config.sharedMemBytes, config.hStream = m["smem"], stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config, attributes

    def launch(
        self,
        values: Sequence[int],
        types: str,
        stream: int = 0,
        cooperative: bool = True,
        dependent: bool = False,
    ) -> None:
        """types: one letter per value, `q` for 64-bit and `i` for 32-bit integers.

        cooperative: all CTAs resident at once or an error. dependent: the launch may begin before
        the one in front of it in the stream has ended (the kernel waits for it itself).
        """
        kinds = {"q": ctypes.c_int64, "i": ctypes.c_int32}
        params = (tuple(values), tuple(kinds[t] for t in types))
        config, _keep = self._config(stream, cooperative, dependent)
        _ok(self._cu.cuLaunchKernelEx(config, self._function, params, 0), "cuLaunchKernelEx")
