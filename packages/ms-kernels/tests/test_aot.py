"""Ahead-of-time libraries: built atomically, checked on load, and usable from C."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch

from ms_kernels.aot import TARGETS, build, load
from ms_kernels.aot.gpu_library import entries
from ms_kernels.aot.manifest import read_manifest
from ms_kernels.aot.targets import target_named
from ms_kernels.aot.workers import map_in_processes
from ms_kernels.cli import main
from ms_kernels.errors import ArgumentError, BackendError

pytest.importorskip("triton", reason="the extra cuda is not installed")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

TWO_KERNELS = ["scale_cast_bf16", "rms_norm_forward_bf16_4096"]
PROGRAM = """
#include <stdio.h>
#include "ms_kernels.h"

int main(void) {
    ms_status status = ms_rms_norm_forward_bf16_4096(NULL, (void *)64, (void *)64, (void *)64,
        (void *)64, (void *)64, (void *)64, 8, 4096, 4096, 4096, 1e-6f);
    printf("%d|%s|%s\\n", status, ms_status_text(status), ms_last_error());
    status = ms_rms_norm_forward_bf16_4096(NULL, (void *)64, (void *)64, (void *)64,
        (void *)64, (void *)64, (void *)64, 8, 8192, 8192, 8192, 1e-6f);
    printf("%d|%s\\n", status, ms_last_error());
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the folder of a small library for sm_90."""
    return build("sm_90", tmp_path_factory.mktemp("lib"), only=TWO_KERNELS)


def has_driver():
    """Return whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_a_library_is_a_folder_of_listed_and_checksummed_files(library):
    """The manifest lists every file and each kernel's arguments and resource use."""
    manifest = read_manifest(library)
    files = {entry.path for entry in manifest.files}
    assert files | {"manifest.json"} == {path.name for path in library.iterdir()}
    names = [kernel.name for kernel in manifest.kernels]
    assert names == ["scale_cast_bf16", "rms_norm_forward_bf16_4096"]
    norm = manifest.kernels[1]
    assert norm.spilled_bytes == 0
    assert norm.vector_bits == 128
    assert [parameter.name for parameter in norm.parameters][:2] == ["X", "RESIDUAL"]


@pytest.mark.skipif(has_driver(), reason="there is a driver here; benchmarks/gpu.py launches on it")
def test_a_c_program_gets_error_codes_and_does_not_crash(library, tmp_path):
    """A missing driver and a width that is too large give a status and an error line."""
    (tmp_path / "main.c").write_text(PROGRAM)
    command = ["cc", "-Wall", "-Werror", "main.c", "-I", library, library / "libms_kernels.so"]
    rpath = f"-Wl,-rpath,{library}"
    subprocess.run([*command, rpath, "-o", "main"], cwd=tmp_path, check=True)
    result = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True)
    no_driver, too_wide = result.stdout.splitlines()
    assert no_driver.startswith("2|the driver's library is not on this machine|libcuda.so.1 is not")
    assert too_wide.startswith(
        "1|rms_norm_forward_bf16_4096: width is 8192; it must be from 1 to 4096"
    )


def test_loading_needs_neither_triton_nor_torch_compile(library):
    """A process that cannot import triton opens the library and can read its manifest."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from ms_kernels.aot import load\n"
        f"library = load({str(library)!r})\n"
        "print(len(library.manifest.kernels))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "2\n"


def test_wrong_arguments_are_refused_before_the_launch(library):
    """A misaligned pointer, a size out of range, an unknown name."""
    aot_library = load(library)
    valid = {"X": 64, "FACTOR": 64, "Y": 64, "count": 32, "factor": 1.0}
    for change, message in (
        ({"X": 8}, "X is 0x8; it must be an address, a multiple of 16"),
        ({"X": 0}, "X is (nil)"),
        ({"count": 33}, "count is 33; it must be a multiple of 16"),
        ({"count": -16}, "count is -16; it must be from 0"),
    ):
        with pytest.raises(BackendError) as caught:
            aot_library.launch("scale_cast_bf16", **{**valid, **change})
        assert message in str(caught.value)
    with pytest.raises(ArgumentError, match="size is not an argument of the kernel"):
        aot_library.launch("scale_cast_bf16", **valid, size=3)
    with pytest.raises(ArgumentError, match="factor is missing"):
        aot_library.launch("scale_cast_bf16", X=64, FACTOR=64, Y=64, count=32)
    with pytest.raises(BackendError, match="no kernel 'swish'"):
        aot_library.launch("swish")


def test_an_empty_call_launches_nothing(library):
    """A call on zero rows returns immediately and needs no driver."""
    load(library).launch("scale_cast_bf16", X=64, FACTOR=64, Y=64, count=0, factor=1.0)


@pytest.mark.parametrize("fault", ["a bit", "a byte", "absent", "format", "outside", "no library"])
def test_a_damaged_library_does_not_open(library, tmp_path, fault):
    """The manifest is checked before any file is opened."""
    folder = shutil.copytree(library, tmp_path / "copy")
    shared, manifest = folder / "libms_kernels.so", folder / "manifest.json"
    if fault == "a bit":
        content = bytearray(shared.read_bytes())
        content[-1] ^= 1
        shared.write_bytes(content)
    elif fault == "a byte":
        shared.write_bytes(shared.read_bytes() + b"x")
    elif fault == "absent":
        shared.unlink()
    elif fault == "no library":
        manifest.unlink()
    else:
        old, new = (
            ("ms-kernels.1", "ms-kernels.9") if fault == "format" else ('"libms', '"../libms')
        )
        manifest.write_text(manifest.read_text().replace(old, new))
    with pytest.raises(BackendError) as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) == 1
    assert str(folder) in str(caught.value)


def test_an_interrupted_build_leaves_no_output_and_resumes(tmp_path, monkeypatch):
    """Kernels compiled before the interruption are not compiled again."""
    from ms_kernels.aot import gpu_library

    compiled = []

    def stop(name, done, count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("sm_90", tmp_path, only=TWO_KERNELS, progress=stop)
    assert not (tmp_path / "sm_90").exists()
    original = gpu_library.compile_entry
    monkeypatch.setattr(
        gpu_library, "compile_entry", lambda *args: compiled.append(args[0].name) or original(*args)
    )
    assert build("sm_90", tmp_path, only=TWO_KERNELS) == tmp_path / "sm_90"
    assert compiled == ["rms_norm_forward_bf16_4096"]
    assert load(tmp_path / "sm_90")
    assert [path.name for path in tmp_path.iterdir()] == ["sm_90"]


def test_parallel_builds_equal_serial_builds(library, tmp_path):
    """Byte for byte and in the same order; this test uses processes even for single kernels."""
    from ms_kernels.aot import gpu_library

    selected = [entry for entry in entries("sm_90") if entry.name in TWO_KERNELS]
    work = partial(gpu_library._cached_or_compiled, target=target_named("sm_90"), work=tmp_path)
    kernels = list(map_in_processes(work, selected, jobs=2, min_items=1))
    assert [kernel.entry.name for kernel in kernels] == [entry.name for entry in selected]
    for kernel in kernels:
        assert kernel.binary == (library / f"{kernel.entry.name}.cubin").read_bytes()


def test_the_build_command_builds_for_amd_and_rejects_bad_input(tmp_path, capsys):
    """Exit code 0 with the folder; 2 with one line for a wrong target or an existing folder."""
    arguments = ["build", "--target", "gfx942", "--out", str(tmp_path), "--only", "scale_cast_bf16"]
    assert main(arguments) == 0
    assert "for gfx942" in capsys.readouterr().out
    assert read_manifest(tmp_path / "gfx942").kernels[0].registers > 0
    assert main(arguments) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert main(["build", "--target", "sm_91", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == f"ms-kernels: target must be one of {', '.join(TARGETS)}, got 'sm_91'\n"
    assert main([*arguments[:2], "sm_90", *arguments[3:6], "nothing"]) == 2
    assert "there are attention_backward_keys" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as caught:
        main([*arguments[:4], str(tmp_path / "file"), "--only", "scale_cast_bf16"])
    assert caught.value.code == 2
    assert "which is a file, but a folder will be written" in capsys.readouterr().err
    assert main([*arguments, "--jobs", "0"]) == 2


def test_entry_names_are_unique():
    """Two kernels with one name would be the same C function."""
    for target in TARGETS:
        names = [entry.name for entry in entries(target)]
        assert len(names) == len(set(names))


CPU_PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include "ms_kernels.h"

int main(int count, char **arguments) {
    enum { ROWS = 5, WIDTH = 96 };
    static float x[ROWS * WIDTH], weight[WIDTH], out[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = (float)(i % 13) - 6;
    for (int i = 0; i < WIDTH; i++) weight[i] = 1 + 0.01f * i;
    ms_tensor inputs[] = {{x, MS_FLOAT32, 2, {ROWS, WIDTH}}, {weight, MS_FLOAT32, 1, {WIDTH}}};
    ms_tensor output = {out, MS_FLOAT32, 2, {ROWS, WIDTH}};
    ms_status status = ms_run(arguments[1], "rms_norm", inputs, 2, &output, 1);
    if (status) { fprintf(stderr, "%s\\n", ms_last_error()); return status; }
    for (int i = 0; i < ROWS * WIDTH; i++) printf("%.9g\\n", out[i]);
    output.sizes[1] = 3;
    if (ms_run(arguments[1], "rms_norm", inputs, 2, &output, 1) != MS_BAD_ARGUMENT) return 90;
    if (ms_run(arguments[1], "absent", inputs, 2, &output, 1) != MS_NO_MODEL) return 91;
    if (ms_run(arguments[1], "rms_norm", inputs, 1, &output, 1) != MS_BAD_ARGUMENT) return 92;
    return 0;
}
"""


@pytest.mark.slow
def test_a_c_program_runs_the_cpu_library(tmp_path):
    """AOTInductor's package, run from C at sizes it was not traced with, equals the reference."""
    folder = build("cpu", tmp_path / "lib", only=["rms_norm"])
    (tmp_path / "main.c").write_text(CPU_PROGRAM)
    command = ["cc", "-Wall", "-Werror", "main.c", "-I", folder, folder / "libms_kernels.so"]
    rpath = f"-Wl,-rpath,{folder}"
    subprocess.run([*command, rpath, "-o", "main"], cwd=tmp_path, check=True)
    torch_folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    process = subprocess.run(
        [tmp_path / "main", folder],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": torch_folder},
    )
    assert process.returncode == 0, process.stderr
    output = torch.tensor([float(line) for line in process.stdout.splitlines()]).view(5, 96)
    x = torch.arange(5 * 96).remainder(13).sub(6).float().view(5, 96)
    weight = 1 + 0.01 * torch.arange(96).float()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["kind"] == "models"
    with pytest.raises(BackendError, match="models for the CPU"):
        load(folder)
