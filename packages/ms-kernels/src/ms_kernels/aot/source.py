"""C source of a library: the header, and one function per kernel."""

from collections.abc import Sequence

from attrs import asdict

from ms_kernels.aot.compiling import Compiled
from ms_kernels.aot.manifest import Kernel, Parameter
from ms_kernels.aot.targets import Target
from ms_kernels.core.entries import DIVISORS

STATUSES = (
    ("MS_OK", "done"),
    ("MS_BAD_ARGUMENT", "an argument does not fit; nothing was launched"),
    ("MS_NO_DRIVER", "the driver's library is not on this machine"),
    ("MS_NO_DEVICE", "no device, or no current context"),
    ("MS_WRONG_CHIP", "the library was built for another chip"),
    ("MS_DRIVER_ERROR", "the driver reported an error"),
)

_C = {"pointer": "void *", "i32": "int64_t ", "i64": "int64_t ", "f32": "float "}
_KINDS = {"i32": "i32", "i64": "i64", "fp32": "f32"}


def describe(compiled: Compiled) -> Kernel:
    """Return the manifest entry of one kernel."""
    entry = compiled.entry
    extra = [Parameter(name, "i64", taken=False) for name in entry.extra]
    runtime = [
        Parameter(
            name,
            "pointer" if ctype.startswith("*") else _KINDS[ctype],
            16 if entry.aligned(name) else 1,
        )
        for name, ctype in compiled.parameters
        if name != "first"  # the launcher sets it
    ]
    return Kernel(
        name=entry.name,
        dtype=entry.dtype,
        parameters=extra + runtime,
        tiles=entry.tiles,
        limits=dict(entry.limits),
        constants=dict(entry.constants),
        **asdict(compiled.resources),
    )


def header(target: Target, kernels: Sequence[Kernel]) -> str:
    """Return the text of ``ms_kernels.h``."""
    statuses = "\n".join(
        f"    {name} = {code}, /* {text} */" for code, (name, text) in enumerate(STATUSES)
    )
    functions = "\n\n".join(f"{_comment(kernel)}\n{_prototype(kernel)};" for kernel in kernels)
    return f"""/* The operators of ms-kernels, compiled for {target.name}.
 *
 * Every function launches one kernel on a stream of the current device and returns at once.
 * Pointers are device addresses, multiples of 16; sizes and strides count elements. The source,
 * ms_kernels/operators/NAME/kernels.py, documents the kernels and their required layouts.
 */
#ifndef MS_KERNELS_H
#define MS_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define MS_TARGET "{target.name}"

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

typedef void *ms_stream; /* a CUstream or hipStream_t; NULL for the default one */

typedef enum {{
{statuses}
}} ms_status;

/* Description of a status. */
const char *ms_status_text(ms_status status);

/* One-line description of the last error in this thread. */
const char *ms_last_error(void);

{functions}

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}}
#endif

#endif
"""


def _comment(kernel: Kernel) -> str:
    limits = [f"{name} <= {limit}" for name, limit in kernel.limits.items()]
    multiples = [
        parameter.name
        for parameter in kernel.parameters
        if parameter.kind != "pointer" and parameter.multiple_of > 1
    ]
    if multiples:
        limits.append(f"{', '.join(multiples)}: multiples of 16")
    constants = ", ".join(f"{name}={value}" for name, value in kernel.constants.items())
    return f"/* {constants}{'; ' if limits else ''}{'; '.join(limits)} */"


def _prototype(kernel: Kernel) -> str:
    arguments = [
        "ms_stream stream",
        *(f"{_C[parameter.kind]}{parameter.name}" for parameter in kernel.parameters),
    ]
    return f"ms_status ms_{kernel.name}({', '.join(arguments)})"


def table(compiled: Sequence[Compiled], kernels: Sequence[Kernel], target: Target) -> str:
    """Return the C text of the embedded kernels and their functions, included by the launcher."""
    parts = []
    for binary, kernel in zip(compiled, kernels, strict=True):
        parts.append(_embedded(binary, target))
        parts.append(_function(binary, kernel))
    return "\n".join(parts)


def _embedded(compiled: Compiled, target: Target) -> str:
    name = compiled.entry.name
    # At most 1,024 threads per program, with 32 or 64 lanes per warp.
    threads = min(compiled.entry.warps, 1024 // target.lanes) * target.lanes
    return f"""
__asm__(".section .rodata\\n.balign 64\\ncode_{name}:\\n.incbin \\"{name}.{target.suffix}\\"\\n"
        ".byte 0\\n.previous\\n");
extern const unsigned char code_{name}[] __attribute__((visibility("hidden")));
static ms_kernel kernel_{name} = {{"{name}", "{compiled.symbol}", code_{name},
                                  {threads}, {compiled.resources.shared_bytes}, {{0}}}};"""


def _function(compiled: Compiled, kernel: Kernel) -> str:
    """Return the C function of one kernel: argument checks, then the launch."""
    constants = [
        f"    const int64_t {name} = {int(value)}; (void){name};"
        for name, value in kernel.constants.items()
        if not isinstance(value, str)
    ]
    # C functions take sizes as int64_t, so that values beyond 32 bits are rejected, not cut.
    checks, narrowed = [], []
    for parameter in kernel.parameters:
        if parameter.kind == "pointer":
            checks.append(f'check_pointer("{kernel.name}", "{parameter.name}", {parameter.name})')
        elif parameter.kind != "f32":
            upper = kernel.limits.get(parameter.name)
            upper = upper or ("INT32_MAX" if parameter.kind == "i32" else "INT64_MAX")
            # Sizes and strides are at least 0, and divisors 1; only `ignore_index` may be negative.
            lower = (
                "INT64_MIN"
                if parameter.name == "ignore_index"
                else str(int(parameter.name in DIVISORS))
            )
            detail = (
                f'"{parameter.name}", {parameter.name}, {lower}, {upper}, {parameter.multiple_of}'
            )
            checks.append(f'check_size("{kernel.name}", {detail})')
            if parameter.kind == "i32":
                narrowed.append(f"    int32_t {parameter.name}_ = (int32_t){parameter.name};")
    kernel_parameters = [parameter for parameter in kernel.parameters if parameter.taken]
    pointers = [
        f"&{parameter.name}{'_' * (parameter.kind == 'i32')}" for parameter in kernel_parameters
    ]
    # `first` is the first tile of a launch; scratch pointers are null.
    pointers = ["&first", *pointers, *["&nothing"] * compiled.scratch]
    checked = " ||\n        ".join(f"(status = {parameter})" for parameter in checks)
    return f"""
{_prototype(kernel)} {{
{chr(10).join(constants)}
    ms_status status;
    if ({checked})
        return status;
{chr(10).join(narrowed)}
    int32_t first = 0;
    void *nothing = NULL;
    void *parameters[] = {{{", ".join(pointers)}}};
    (void)nothing;
    return launch(&kernel_{kernel.name}, stream, {kernel.tiles}, &first, parameters);
}}
"""
