"""The command ``verify`` and ``apply --verify``: what is started, what is left, how it ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fake_environments as fake
import fake_vllm
from command_line import Ended, on_a_terminal, run, snapshot
from conftest import small_copy
from fake_vllm import INIT, MODELS
from safety_table import Tried
from vllm_eagle3_patch.assess.assessment import Assessment, FileStatus
from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.ground.errors import VllmNotFoundError, WrongUsageError
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.ground.processes import is_running
from vllm_eagle3_patch.installation.find import Installation
from vllm_eagle3_patch.transaction.state.lock import exclusive
from vllm_eagle3_patch.verify.results import CheckResult, ModelResult, Verification
from vllm_eagle3_patch.verify.verification import interpreter_of, unexpected, verify
from vllm_eagle3_patch.vllm_source.sources import Sources

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "check.json").read_text())
DEEPSEEK = f"{MODELS}/deepseek_v2.py"
TEXT, WRAPPER = "DeepseekV2ForCausalLM", "KimiK25ForConditionalGeneration"
STATE = ".vllm-eagle3-patch"


def facts(architecture: str, *missing: str) -> ModelFacts:
    return ModelFacts(architecture, ("a",), missing, None, engine=False, limits=())


def assessed(
    installation: Installation, *found: ModelFacts, files: tuple[FileStatus, ...] = ()
) -> Assessment:
    return Assessment(installation, Sources(installation.root), None, None, files, found)


def patched(path: str, *patches: str, state: str = "patched") -> FileStatus:
    return FileStatus(path, state, "0" * 64, patches, known=True)


# A real interpreter with a small vLLM


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made; nothing may be left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def environment(tmp_path: Path, temporary: Path) -> Installation:
    """An interpreter with a small vLLM that passes."""
    python = fake.make_venv(tmp_path / "venv")
    root = fake_vllm.install(fake.site_packages_of(tmp_path / "venv"))
    return Installation(root, "0.17.1", "vllm", str(python), None, False, "--python", (), (), None)


def change(installation: Installation, path: str, text: str) -> None:
    """Put lines first in one of its files."""
    file = installation.root / path
    file.write_text(f"{text}\n{file.read_text()}")


def proven(installation: Installation, timeout: float = 60.0, **more: Any) -> Verification:
    assessment = assessed(installation, facts(TEXT), facts(WRAPPER))
    return verify(installation, assessment, timeout=timeout, **more)


def test_all_models_are_checked_by_the_interpreter(environment: Installation) -> None:
    before = snapshot(environment.root)
    told: list[str] = []
    verification = proven(environment, progress=told.append)
    assert [(m.architecture, m.ok) for m in verification.models] == [(TEXT, True), (WRAPPER, True)]
    assert "image-token" in {check.name for check in verification.models[1].checks}
    assert not verification.gpu_context
    assert 0 <= verification.import_seconds <= verification.seconds
    assert told == [f"importing vLLM 0.17.1 with {environment.python} (8 to 16 s) ..."]
    assert snapshot(environment.root) == before


def test_models_can_be_named(environment: Installation) -> None:
    verification = proven(environment, models=(WRAPPER, "NotShipped"))
    assert [model.architecture for model in verification.models] == [WRAPPER]


def test_without_a_model_nothing_is_started(environment: Installation) -> None:
    verification = proven(replace(environment, python="/no/such/python"), models=())
    assert verification.models == ()


@pytest.mark.parametrize("state", ["patched", "modified"])
def test_the_edges_are_asked_of_what_we_wrote(state: str, environment: Installation) -> None:
    file = environment.root / DEEPSEEK
    file.write_text(file.read_text().replace("hidden_states.clone() if", "hidden_states if"))
    assert proven(environment).models[0].ok is True
    ours = patched(DEEPSEEK, "deepseek-v2", state=state)
    assessment = assessed(environment, facts(TEXT), files=(ours,))
    (model,) = verify(environment, assessment, timeout=60).models
    assert [check.name for check in model.failed] == ["aux-hidden-states"]


SPY = """
import json, os, sys, tempfile
tempfile.mkdtemp()
with open({path!r}, "w") as file:
    json.dump([dict(os.environ), sys.path, sys.dont_write_bytecode, os.getcwd()], file)
for name in ("VLLM_CACHE_ROOT", "HF_HOME", "TRITON_CACHE_DIR"):
    open(os.path.join(os.environ[name], "written"), "w").close()
"""


def test_what_vllm_writes_goes_to_a_folder_that_is_removed(
    environment: Installation, tmp_path: Path, temporary: Path
) -> None:
    change(environment, INIT, SPY.format(path=str(tmp_path / "seen.json")))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "more"), "CUDA_VISIBLE_DEVICES": "1"}
    proven(environment, environ=environ)
    seen, path, no_bytecode, folder = json.loads((tmp_path / "seen.json").read_text())
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TMPDIR")
    for name in names:
        assert seen[name].startswith(f"{temporary}/vllm-eagle3-patch-")
    assert seen["HF_HUB_OFFLINE"] == seen["VLLM_NO_USAGE_STATS"] == "1"
    assert seen["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert seen["CUDA_VISIBLE_DEVICES"] == "1"
    assert str(tmp_path / "more") in path
    assert "" not in path
    assert no_bytecode
    assert Path(folder).parent == temporary
    assert not list(environment.root.rglob("__pycache__"))


NOISE = """
import sys
print("begin-", "end-", "{}", "\\xff" * 200000)
print("WARNING something", file=sys.stderr)
sys.stdout = None
"""


def test_what_vllm_prints_is_passed_over(environment: Installation) -> None:
    change(environment, INIT, NOISE)
    assert proven(environment).models[0].ok is True


def failure(installation: Installation, timeout: float = 60.0) -> VllmNotFoundError:
    with pytest.raises(VllmNotFoundError) as caught:
        proven(installation, timeout)
    assert caught.value.exit_code == 3
    for line in (caught.value.message, caught.value.hint):
        assert "\n" not in line
    return caught.value


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12", "install the torch"),
        ("import no_such_thing", "No module named 'no_such_thing'", "install what this vLLM"),
        ("raise RuntimeError('torch is too\\nold')", "torch is too old", "-c 'import vllm'"),
        ("import os; os._exit(7)", "exited with code 7 while importing vLLM", "'import vllm'"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by signal 11", "'import vllm'"),
        ("import os; os._exit(0)", "exited with code 0 and no answer while", "'import vllm'"),
    ],
)
def test_a_vllm_that_cannot_be_imported(
    line: str, message: str, hint: str, environment: Installation
) -> None:
    change(environment, INIT, line)
    error = failure(environment)
    assert error.code == "cannot-import"
    assert message in error.message
    assert hint in error.hint


def test_an_interpreter_that_is_gone(environment: Installation) -> None:
    error = failure(replace(environment, python="/no/such/python"))
    assert (error.code, error.message) == (
        "cannot-import",
        "cannot run /no/such/python: No such file or directory",
    )


def test_another_vllm_is_imported(environment: Installation, tmp_path: Path) -> None:
    (tmp_path / "other/vllm").mkdir(parents=True)
    error = failure(replace(environment, root=tmp_path / "other"))
    assert error.code == "cannot-import"
    assert f"not from {tmp_path}/other/vllm" in error.message


def test_an_endless_output_is_no_answer(
    environment: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_eagle3_patch.verify.verification._LARGEST_OUTPUT", 100_000)
    change(environment, INIT, "while True: print('x' * 1000)")
    assert "does not answer as Python does" in failure(environment).message


def test_what_someone_else_writes_to_the_temporary_folder_changes_nothing(
    environment: Installation, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patched_os:
        patched_os.setattr("os.rmdir", refuse)
        assert proven(environment).models[0].ok is True
    for left in temporary.iterdir():
        shutil.rmtree(left)


# No process is left

CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]{streams})
with open({path!r}, "w") as file:
    file.write(str(child.pid))
"""
CLOSED = ", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"


def leave_a_child(installation: Installation, tmp_path: Path, then: str, streams: str) -> Path:
    path = tmp_path / "child"
    change(installation, INIT, CHILD.format(path=str(path), streams=streams) + then)
    return path


def assert_gone(child: Path) -> None:
    pid = int(child.read_text())
    deadline = time.monotonic() + 10
    while is_running(pid, None):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)


@pytest.mark.parametrize("streams", ["", CLOSED], ids=["its streams", "no streams"])
def test_a_child_is_killed_after_an_answer(
    streams: str, environment: Installation, tmp_path: Path
) -> None:
    child = leave_a_child(environment, tmp_path, "", streams)
    assert proven(environment).models[0].ok is True
    assert_gone(child)


@pytest.mark.parametrize("streams", ["", CLOSED], ids=["its streams", "no streams"])
@pytest.mark.parametrize(
    "then",
    ["import time; time.sleep(600)", "import os; os.close(1); os.close(2)\nwhile True: pass"],
    ids=["hangs", "closes its streams and hangs"],
)
def test_a_timeout_kills_all(
    streams: str, then: str, environment: Installation, tmp_path: Path
) -> None:
    child = leave_a_child(environment, tmp_path, then, streams)
    error = failure(environment, timeout=1.5)
    assert error.code == "timeout"
    gave = "gave no answer in 1.5 s while importing vLLM or running its models"
    assert error.message == f"{environment.python} {gave}"
    assert error.hint.startswith("allow more with --timeout SECONDS, or see why: ")
    assert_gone(child)


def test_a_child_is_killed_after_the_interpreter_ended(
    environment: Installation, tmp_path: Path
) -> None:
    child = leave_a_child(environment, tmp_path, "import os; os._exit(7)", CLOSED)
    assert "exited with code 7" in failure(environment).message
    assert_gone(child)


def test_an_interruption_kills_all(environment: Installation, tmp_path: Path) -> None:
    child = leave_a_child(environment, tmp_path, "import time; time.sleep(600)", "")

    def interrupt() -> None:
        while not (child.exists() and child.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        proven(environment)
    thread.join()
    assert_gone(child)


# What counts as a failure


def result(architecture: str, **checks: bool | None) -> ModelResult:
    found = tuple(CheckResult(name.replace("_", "-"), ok, "why") for name, ok in checks.items())
    return ModelResult(architecture, found)


@pytest.mark.parametrize(
    ("checks", "ok"),
    [
        ({"methods": True, "aux_hidden_states": True, "allowlist": None}, True),
        ({"methods": False, "aux_hidden_states": True}, False),
        ({"methods": True, "aux_hidden_states": None}, None),
        ({}, None),
    ],
)
def test_a_model_passes_if_its_forward_was_run_and_nothing_fails(
    checks: dict[str, bool | None], ok: bool | None
) -> None:
    assert result(TEXT, **checks).ok is ok


def test_what_could_not_be_run_counts_as_not_proven() -> None:
    loaded = {"import": True, "interface": None, "methods": True, "allowlist": False}
    assert len(result(TEXT, **loaded).applicable) == 3
    assert len(result(TEXT, **loaded | {"import": None, "methods": None}).applicable) == 4


@pytest.mark.parametrize(
    ("check", "missing", "made", "explained"),
    [
        ("methods", (), (), False),
        ("methods", ("deepseek-v2",), (), True),
        ("methods", ("kimi-k25",), (), True),
        ("methods", ("kimi-k25",), ("kimi-k25",), False),
        ("methods", ("eagle3-allowlist", "multimodal-image-token"), (), False),
        ("aux_hidden_states", ("draft-attention-metadata",), (), False),
        ("allowlist", ("eagle3-allowlist",), (), True),
        ("allowlist", ("deepseek-v2",), (), False),
        ("image_token", ("multimodal-image-token",), (), True),
        ("image_token", ("kimi-k25",), (), False),
        ("import", ("deepseek-v2",), (), False),
    ],
)
def test_only_a_missing_patch_explains_a_failure(
    check: str, missing: tuple[str, ...], made: tuple[str, ...], explained: bool, tmp_path: Path
) -> None:
    installation = Installation(tmp_path, None, None, None, None, False, "", (), (), None)
    files = (patched("vllm/a.py", *made, state="modified"),)
    assessment = assessed(installation, facts(WRAPPER, *missing), files=files)
    models = (result(WRAPPER, **{check: False}),)
    assert bool(unexpected(models, assessment)) is not explained


def test_without_an_interpreter_it_is_wrong_usage(environment: Installation) -> None:
    assert interpreter_of(environment) == Path(str(environment.python))
    with pytest.raises(WrongUsageError):
        interpreter_of(replace(environment, python=None))


# The command line: a real release's files, and an interpreter that answers as it is told

ANSWERS = """#!{real}
import json, os, sys, time

if "def prove(" not in sys.argv[3]:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
nonce, request = sys.argv[4], json.loads(sys.argv[5])
with open({told!r}) as file:
    told = json.load(file)
with open({log!r}, "a") as file:
    file.write(json.dumps(request) + "\\n")
if told.get("hangs"):
    with open(told["hangs"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
if told.get("dies"):
    sys.exit("Segmentation fault")
models = []
for model in request["models"]:
    names = ["import", "interface", "methods", "aux-hidden-states", "allowlist"]
    names += ["image-token"] if "language_model" in model else []
    wrong = told["wrong"].get(model["architecture"], {{}})
    checks = [
        {{"name": name, "ok": wrong.get(name, True), "detail": "seen\\nso"}} for name in names
    ]
    models.append({{"architecture": model["architecture"], "checks": checks}})
document = {{
    "error": told.get("error"), "package": {package!r}, "models": models,
    "import_seconds": 1.5, "gpu_context": told.get("gpu_context", False),
    **told.get("answer", {{}}),
}}
print("noise", f"begin-{{nonce}}{{json.dumps(document)}}end-{{nonce}}")
"""


class Server:
    """An environment with vLLM 0.17.1's files whose interpreter answers as it is told."""

    def __init__(self, folder: Path, release: str = "0.17.1") -> None:
        real = fake.make_venv(folder / "venv")
        self.root = small_copy(release, fake.site_packages_of(folder / "venv"))
        self.told, self.log = folder / "told.json", folder / "log"
        text = ANSWERS.format(
            real=str(real), told=str(self.told), log=str(self.log), package=f"{self.root}/vllm"
        )
        self.python = fake.make_script(folder / "server/python", text)
        self.tell()

    def tell(self, wrong: dict[str, dict[str, bool | None]] | None = None, **more: object) -> None:
        self.told.write_text(json.dumps({"wrong": wrong or {}, **more}))

    def run(self, command: str, *more: object) -> Ended:
        return run(command, "--python", self.python, *more)

    def run_json(self, command: str, *more: object) -> Ended:
        ended = self.run(command, "--json", *more)
        jsonschema.validate(ended.document, SCHEMA)
        assert (ended.document["command"], ended.document["exit_code"]) == (
            command,
            ended.exit_code,
        )
        return ended

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What the interpreter was asked to prove, each time that it was."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


UNPATCHED: dict[str, bool | None] = dict.fromkeys(
    ("interface", "methods", "aux-hidden-states", "allowlist"), False
)


def test_an_unpatched_installation_fails_as_expected(server: Server) -> None:
    server.tell({TEXT: UNPATCHED})
    before = snapshot(server.root)
    ended = server.run("verify", "--skip", "aux-layer-ids")
    assert ended.exit_code == 1
    lines = ended.stdout.splitlines()
    row = next(line for line in lines if line.startswith(TEXT))
    assert row.split() == [
        *(TEXT, "failed", "import", "interface,", "methods,", "aux-hidden-states,", "allowlist")
    ]
    assert lines[-2].startswith("To make EAGLE-3 ready for DeepseekV2ForCausalLM, ")
    assert lines[-1] == (f"  vllm-eagle3-patch apply --python {server.python} --skip aux-layer-ids")
    assert not any(line.startswith("failed:") for line in lines)
    assert ended.stderr == f"importing vLLM 0.17.1 with {server.python} (8 to 16 s) ...\n"
    assert snapshot(server.root) == before


def test_a_patched_installation_passes(server: Server) -> None:
    assert server.run("apply").exit_code == 0
    assert server.requests == []
    before = snapshot(server.root)
    ended = server.run("verify")
    assert ended.exit_code == 0
    assert ended.stdout.splitlines()[-1].startswith("Proven by running it, for: DeepseekV2For")
    assert "took " in ended.stdout
    assert "importing vLLM 1.5 s; no GPU context was made" in ended.stdout
    assert snapshot(server.root) == before
    (request,) = server.requests
    assert request["edges"] == ["vllm.model_executor.models.deepseek_v2"]
    asked = {model["architecture"]: model for model in request["models"]}
    assert asked[TEXT] == {"architecture": TEXT, "text_types": ["deepseek_v2"]}
    assert asked[WRAPPER] == {
        "architecture": WRAPPER,
        "text_types": ["kimi_k2", "deepseek_v3"],
        "language_model": "vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM",
        "image_token": "target_model.config.media_placeholder_token_id",
    }
    assert asked["PixtralForConditionalGeneration"]["language_model"] == (
        "vllm.model_executor.models.mistral_large_3:MistralLarge3ForCausalLM"
    )


def test_the_json_has_every_check(server: Server) -> None:
    server.tell({TEXT: {"allowlist": None}}, gpu_context=True)
    ended = server.run_json("verify", "--model", "deepseek_v2", "--model", "kimi_k25")
    verification = ended.document["verification"]
    assert verification["import_seconds"] == 1.5
    assert verification["gpu_context"] is True
    assert [(m["architecture"], m["ok"]) for m in verification["models"]] == [
        (TEXT, True),
        (WRAPPER, True),
    ]
    assert verification["models"][0]["checks"][-1] == {
        "name": "allowlist",
        "ok": None,
        "detail": "seen\\nso",
    }
    assert "importing vLLM" in ended.stderr


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "none"},
        {"error": {"kind": [], "message": "x"}},
        {"package": "/a\0b"},
        {"package": "/gone/vllm"},
        {"import_seconds": None},
        {"models": [{}]},
        {"models": [{"architecture": "\x1b[2J", "checks": []}]},
        {"models": [{"architecture": TEXT, "checks": [{"name": "import"}]}]},
    ],
)
def test_an_answer_that_proof_would_not_give_proves_nothing(
    server: Server, answer: dict[str, object], tried: Tried
) -> None:
    server.tell(answer=answer)
    before = snapshot(server.root)
    for code, *command in ((3, "verify", "--json"), (6, "apply", "--verify")):
        ended = server.run(*command)
        assert ended.exit_code == code, ended
        error, hint = ended.stderr.splitlines()[-2:]
        assert error.startswith("error: ")
        assert "see why: " in hint
        assert ended.stderr.replace("\n", "").isprintable()
        assert snapshot(server.root) == before
    tried(
        "Hostile or bad input",
        "an interpreter that answers verify with something else than proofs",
        how="fields missing, of other types, other models, paths that are not there; verify and "
        "apply --verify",
        count=2,
        result="not proven (3, apply 6), one line and a hint; what apply wrote was put back",
    )


def test_other_commands_have_no_verification(server: Server) -> None:
    for command in ("check", "apply", "diff", "revert"):
        assert "verification" not in server.run_json(command).document


@pytest.mark.parametrize("check", ["methods", "image-token", "import"])
def test_a_ready_model_that_fails_is_6(check: str, server: Server) -> None:
    server.run("apply")
    server.tell({WRAPPER: {check: False}})
    ended = server.run_json("verify")
    assert ended.exit_code == 6
    problem = ended.document["problems"][0]
    assert problem["code"] == "verification"
    assert problem["message"] == f"{WRAPPER} fails {check}: seen\\nso"
    shown = server.run("verify")
    assert shown.exit_code == 6
    assert f"failed: {check}: seen\\nso ({WRAPPER})" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "What should work does not: see what failed above."
    # Another model is not asked about it.
    assert server.run("verify", "--model", "deepseek_v3").exit_code == 0


def test_an_unpatched_model_that_fails_for_another_reason_is_6(server: Server) -> None:
    server.tell({TEXT: {"import": False}})
    assert server.run("verify").exit_code == 6


def test_a_model_that_could_not_be_run_changes_nothing(server: Server) -> None:
    server.run("apply")
    not_run: dict[str, bool | None] = dict.fromkeys(("import", *UNPATCHED), None)
    server.tell({TEXT: not_run, WRAPPER: {"allowlist": None}})
    ended = server.run("verify", "--model", TEXT, "--model", WRAPPER)
    assert ended.exit_code == 0
    assert f"not run: import: seen\\nso ({TEXT})" in ended.stdout
    assert "does not apply: allowlist: seen\\nso\n" in ended.stdout
    assert "not apply: methods" not in ended.stdout
    assert ended.stdout.splitlines()[-1] == f"Proven by running it, for: {WRAPPER}."


def test_where_no_model_could_be_run_nothing_is_proven(server: Server) -> None:
    server.run("apply")
    not_run: dict[str, bool | None] = dict.fromkeys(("import", *UNPATCHED), None)
    server.tell({TEXT: not_run, WRAPPER: not_run})
    ended = server.run_json("verify", "--model", TEXT)
    assert ended.exit_code == 3
    assert ended.document["problems"][0]["code"] == "nothing-proven"
    assert "seen" in ended.document["problems"][0]["message"]
    shown = server.run("verify", "--model", TEXT)
    assert shown.stdout.splitlines()[-1] == "Nothing is proven: no model could be run."


def test_apply_is_undone_where_nothing_could_be_proven(server: Server) -> None:
    before = snapshot(server.root)
    not_run: dict[str, bool | None] = dict.fromkeys(("import", *UNPATCHED), None)
    server.tell({model.architecture: not_run for model in FAMILY})
    ended = server.run_json("apply", "--verify")
    assert ended.exit_code == 6
    assert ended.document["problems"][0]["message"].startswith("nothing is proven")
    assert snapshot(server.root) == before


def test_more_than_one_failure_is_counted(server: Server) -> None:
    server.run("apply")
    server.tell({TEXT: {"methods": False}, WRAPPER: {"methods": False}})
    message = server.run_json("verify").document["problems"][0]["message"]
    assert message == f"{TEXT} fails methods: seen\\nso (the first of 2 failures)"


def test_the_engine_decides_as_for_check(tmp_path: Path) -> None:
    server = Server(tmp_path, "0.9.2")
    assert server.run("verify").exit_code == 4
    assert server.run("verify", "--interface-only").exit_code in (1, 6)
    server.tell(dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), UNPATCHED))
    assert server.run("apply", "--interface-only", "--verify").exit_code == 6
    server.tell()
    assert server.run("apply", "--interface-only", "--verify").exit_code == 0
    assert server.run("verify").exit_code == 4
    assert server.run("verify", "--interface-only").exit_code == 0


def test_a_run_in_progress_is_in_the_way(server: Server) -> None:
    with exclusive(server.root):
        assert server.run_json("verify").exit_code == 7
    assert server.requests == []


def test_a_corrupt_state_is_told(server: Server) -> None:
    server.run("apply")
    (server.root / STATE / "manifest.json").write_text("{")
    ended = server.run_json("verify")
    assert ended.exit_code == 0
    assert "state-corrupt" in ended.codes


@pytest.mark.parametrize("command", [["verify"], ["apply", "--verify"]])
def test_a_folder_is_not_enough(command: list[str], site_packages: Path) -> None:
    before = snapshot(site_packages)
    ended = run(*command, "--site-packages", site_packages)
    assert ended.exit_code == 2
    assert ended.stderr == (
        "error: verify needs the interpreter that runs vLLM\n"
        "  name it with --python PATH instead of --site-packages DIR\n"
    )
    ended = run(*command, "--site-packages", site_packages, "--json")
    assert ended.exit_code == 2
    jsonschema.validate(ended.document, SCHEMA)
    assert ended.document["problems"][0]["code"] == "usage"
    assert snapshot(site_packages) == before


@pytest.mark.parametrize("value", ["0", "-1", "nan", "x", "99999999"])
def test_a_timeout_is_a_number_of_seconds(value: str, server: Server) -> None:
    assert server.run("verify", "--timeout", value).exit_code == 2
    assert server.requests == []


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"error": {"kind": "error", "message": "vllm: RuntimeError: no"}}, "cannot-import"),
        ({"dies": True}, "cannot-import"),
    ],
)
def test_a_vllm_that_cannot_be_imported_is_3(
    told: dict[str, object], code: str, server: Server
) -> None:
    server.tell(None, **told)
    ended = server.run_json("verify")
    assert ended.exit_code == 3
    (problem,) = ended.document["problems"]
    assert problem["code"] == code
    assert ended.document["vllm"]["version"] == "0.17.1"
    shown = server.run("verify")
    error = shown.stderr.splitlines()[1:]
    assert len(error) == 2
    assert error[0].startswith("error: ")


# apply --verify


def test_apply_runs_what_it_wrote(server: Server) -> None:
    ended = server.run_json("apply", "--verify")
    assert ended.exit_code == 0
    assert ended.document["changed"]
    assert {m["ok"] for m in ended.document["verification"]["models"]} == {True}
    (request,) = server.requests
    assert request["edges"] == ["vllm.model_executor.models.deepseek_v2"]
    shown = server.run("apply", "--verify")
    assert shown.exit_code == 0
    assert "passed" in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("Nothing to do")


@pytest.mark.parametrize(
    ("wrong", "told", "message"),
    [
        (
            {WRAPPER: {"image-token": False}},
            {},
            f"{WRAPPER} fails image-token: seen\\nso",
        ),
        (
            {},
            {"error": {"kind": "shared-library", "message": "torch: OSError: x.so"}},
            "could not be verified: {python} cannot import vLLM: torch: OSError: x.so",
        ),
        ({}, {"dies": True}, "could not be verified: {python} exited with code 1"),
    ],
)
def test_apply_puts_everything_back_if_it_fails(
    wrong: dict[str, dict[str, bool | None]],
    told: dict[str, object],
    message: str,
    server: Server,
) -> None:
    before = snapshot(server.root)
    server.tell(wrong, **told)
    ended = server.run_json("apply", "--verify")
    assert ended.exit_code == 6
    (problem,) = ended.document["problems"]
    assert problem["code"] == "verification"
    assert problem["message"].startswith(message.format(python=server.python))
    assert problem["hint"].startswith("every file was put back; ")
    assert ended.document["changed"] == []
    assert ("verification" in ended.document) is bool(wrong)
    assert len(server.requests) == 1
    after = {path: e for path, e in snapshot(server.root).items() if not path.startswith(STATE)}
    assert after == before
    server.tell()
    assert server.run("apply", "--verify").exit_code == 0


def test_apply_puts_everything_back_if_it_is_interrupted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> Verification:
        raise KeyboardInterrupt

    before = snapshot(server.root)
    monkeypatch.setattr("vllm_eagle3_patch.verify.verification.verify", interrupt)
    assert server.run("apply", "--verify").exit_code == 130
    after = {path: e for path, e in snapshot(server.root).items() if not path.startswith(STATE)}
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_apply_puts_everything_back_if_a_signal_ends_it(
    number: signal.Signals, server: Server, tmp_path: Path
) -> None:
    before = snapshot(server.root)
    child, temporary = tmp_path / "child", tmp_path / "temporary"
    temporary.mkdir()
    server.tell(hangs=str(child))
    command = [sys.executable, "-m", "vllm_eagle3_patch", "apply", "--verify", "--json"]
    with subprocess.Popen(
        [*command, "--python", str(server.python)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        while not (child.exists() and child.read_text()):
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate()
    assert process.returncode == json.loads(output)["exit_code"] == 128 + number
    assert_gone(child)
    assert list(temporary.iterdir()) == []
    after = {path: e for path, e in snapshot(server.root).items() if not path.startswith(STATE)}
    assert after == before
    assert server.run("check").exit_code == 1


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_so(
    ignored: signal.Signals, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: object, **__: object) -> Verification:
        os.kill(os.getpid(), ignored)
        return Verification(1, 1, gpu_context=False, models=())

    monkeypatch.setattr("vllm_eagle3_patch.verify.verification.verify", send)
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        assert server.run("apply", "--verify").exit_code == 0
        assert signal.getsignal(ignored) is signal.SIG_IGN
    finally:
        signal.signal(ignored, before)


def test_apply_runs_what_is_in_place_already(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.run("apply")
    before = snapshot(server.root)
    server.tell({TEXT: {"methods": False}})
    runs = []

    def counted(*arguments: Any, **named: Any) -> Verification:
        runs.append(arguments)
        return verify(*arguments, **named)

    monkeypatch.setattr("vllm_eagle3_patch.verify.verification.verify", counted)
    ended = server.run_json("apply", "--verify")
    assert len(runs) == 1
    assert ended.exit_code == 6
    assert ended.document["problems"][0]["hint"].startswith("nothing was changed; ")
    assert snapshot(server.root) == before


def test_apply_requires_only_what_lacks_nothing(server: Server) -> None:
    server.tell({WRAPPER: UNPATCHED | {"import": False}})
    ended = server.run_json("apply", "--verify", "--skip", "kimi-k25")
    assert ended.exit_code == 0
    models = {m["architecture"]: m["ok"] for m in ended.document["verification"]["models"]}
    assert (models[TEXT], models[WRAPPER]) == (True, False)


def test_a_full_temporary_folder_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(server.root)
    make = Path.mkdir

    def full(path: Path, *more: Any, **named: Any) -> None:
        if path.name == "triton_cache_dir":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, *more, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    for command in (["verify"], ["apply", "--verify"]):
        ended = server.run_json(*command)
        assert ended.exit_code == 7
        (problem,) = ended.document["problems"]
        assert problem["code"] == "disk-full"
        assert "triton_cache_dir: No space left on device" in problem["message"]
    after = {path: e for path, e in snapshot(server.root).items() if not path.startswith(STATE)}
    assert after == before


@pytest.mark.parametrize("option", ["--dry-run", "--diff"])
def test_a_dry_run_runs_nothing(option: str, server: Server) -> None:
    ended = server.run_json("apply", "--verify", option)
    assert ended.exit_code == 1
    assert ended.document["notes"] == ["not verified, as nothing was written"]
    assert server.requests == []


def test_what_cannot_be_patched_is_not_run(tmp_path: Path) -> None:
    server = Server(tmp_path, "0.9.2")
    assert server.run("apply", "--verify").exit_code == 4
    assert server.requests == []


# Progress on a terminal


def test_a_terminal_gets_a_spinner(server: Server, tmp_path: Path) -> None:
    with (tmp_path / "report").open("wb") as report:
        output = on_a_terminal("verify", "--json", "--python", server.python, stdout=report)
    assert json.loads((tmp_path / "report").read_bytes())["command"] == "verify"
    assert "importing vLLM 0.17.1" in output
    assert "\x1b[" in output


def test_nobody_needs_to_read_the_progress(server: Server) -> None:
    command = [sys.executable, "-m", "vllm_eagle3_patch", "verify", "--python", str(server.python)]
    for closing in ("2>&-", "2>/dev/full"):
        done = subprocess.run(
            ["bash", "-c", f'"$@" {closing}', "bash", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "passed" in done.stdout
