"""Builders of virtual environments and vLLM installations small enough for a test."""

import base64
import hashlib
import os
import sys
import venv
from pathlib import Path

SOURCES = {
    "vllm/__init__.py": b"raise RuntimeError('a test imported vllm')\n",
    "vllm/config/speculative.py": b"TYPES = ['llama']\n",
}


def make_venv(folder: Path, *, system_site_packages: bool = False) -> Path:
    """A real virtual environment without pip; returns its interpreter."""
    venv.EnvBuilder(symlinks=True, system_site_packages=system_site_packages).create(folder)
    return folder / "bin" / "python"


def site_packages_of(environment: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


def make_package(folder: Path, version: str | None = "0.16.0") -> Path:
    """The package vllm alone; importing it fails. Returns ``folder``."""
    for name, content in SOURCES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if version is not None:
        (folder / "vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
    return folder


def record_line(folder: Path, path: str) -> str:
    content = (folder / path).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}"


def make_dist_info(
    folder: Path,
    record: list[str] | None,
    *,
    name: str = "vllm",
    version: str = "0.16.0",
    installer: str | None = "uv",
) -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nVersion: of the prose\n"
    )
    (info / "top_level.txt").write_text("vllm\n")
    if installer is not None:
        (info / "INSTALLER").write_text(f"{installer}\n")
    if record is not None:
        lines = [*record, f"{info.name}/RECORD,,"]
        (info / "RECORD").write_bytes(os.fsencode("".join(f"{line}\n" for line in lines)))
    return info


def install_vllm(
    folder: Path, version: str = "0.16.0", *, name: str = "vllm", installer: str | None = "uv"
) -> Path:
    """An installation from a wheel; returns the metadata folder."""
    make_package(folder, version)
    files = [str(path.relative_to(folder)) for path in sorted((folder / "vllm").rglob("*.py"))]
    record = [record_line(folder, file) for file in files]
    return make_dist_info(folder, record, name=name, version=version, installer=installer)


def make_checkout(folder: Path, version: str = "0.16.1.dev3") -> Path:
    make_package(folder, version)
    (folder / "pyproject.toml").write_text("[project]\nname = 'vllm'\n")
    return folder


def install_editable_hook(site_packages: Path, checkout: Path, mapping: str | None = None) -> Path:
    """As setuptools does for a flat layout; returns the metadata folder."""
    hook = "__editable___vllm_0_16_1_dev3_finder"
    package = str(checkout / "vllm")
    (site_packages / f"{hook}.py").write_text(
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        f"MAPPING: dict[str, str] = {mapping or repr({'vllm': package})}\n"
        "NAMESPACES: dict[str, list[str]] = {}\n\n\n"
        "class _EditableFinder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, fullname, path=None, target=None):\n"
        "        if fullname in MAPPING:\n"
        "            location = MAPPING[fullname] + '/__init__.py'\n"
        "            return spec_from_file_location(\n"
        "                fullname, location, submodule_search_locations=[MAPPING[fullname]]\n"
        "            )\n\n\n"
        "def install():\n"
        "    sys.meta_path.append(_EditableFinder)\n"
    )
    (site_packages / "__editable__.vllm-0.16.1.dev3.pth").write_text(
        f"import {hook}; {hook}.install()"
    )
    return _editable_dist_info(site_packages, checkout)


def install_editable_path(site_packages: Path, checkout: Path) -> Path:
    """As other build backends do, and setuptools for a src layout."""
    (site_packages / "_vllm.pth").write_bytes(os.fsencode(checkout) + b"\n")
    return _editable_dist_info(site_packages, checkout)


def _editable_dist_info(site_packages: Path, checkout: Path) -> Path:
    info = make_dist_info(site_packages, [], version="0.16.1.dev3", installer="pip")
    (info / "direct_url.json").write_text(
        f'{{"dir_info": {{"editable": true}}, "url": "{checkout.as_uri()}"}}'
    )
    return info


def make_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.fsencode(text))
    path.chmod(0o755)
    return path
