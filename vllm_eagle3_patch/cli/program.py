"""The command line: it parses and renders, nothing else."""

from __future__ import annotations

import functools
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.cli import termination
from vllm_eagle3_patch.output.installations import print_everywhere
from vllm_eagle3_patch.output.matrix import print_matrix, print_release
from vllm_eagle3_patch.output.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_eagle3_patch.assess.decision import Options
    from vllm_eagle3_patch.commands.report import Report
    from vllm_eagle3_patch.installation.find import Where

# Seconds. An import of vLLM takes 5 to 17 s on two cores; some file systems are far slower.
_TIMEOUT, _LONGEST_TIMEOUT = 300, 24 * 60 * 60

_HELP = {"help_option_names": ["-h", "--help"]}


def _examples(*lines: str) -> str:
    """What stands at the end of a command's help, unwrapped."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def _completed_by(name: str) -> Callable[..., Any]:
    """How an option's value is completed: by a function that is imported when a shell asks."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> Any:
        from vllm_eagle3_patch.cli import completion

        return getattr(completion, name)(context, parameter, incomplete)

    return complete


class _Program(click.Group):
    """The group of commands; wrong usage and unwritable output end as everything else does."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are used."""
        return list(self.commands)

    def main(self, args: Sequence[str] | None = None, *more: Any, **named: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        named["standalone_mode"] = False
        try:
            code = super().main(given, *more, **named)
        except click.ClickException as error:
            code = termination.end_of_usage_error(error, given)
        except click.Abort:
            code = termination.end_of_abort(given)
        except OSError as error:
            if "--debug" in given:
                raise
            # Only the help and the version are not printed by a command.
            code = termination.end_of_unwritten_output(error, 0)
        sys.exit(code)


class _Folder(click.Path):
    """A path; whether it can be read is found out, and told, by who reads it."""

    def __init__(self) -> None:
        super().__init__(readable=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path names nothing", param, ctx)
        return super().convert(value, param, ctx)


@click.group(
    cls=_Program,
    context_settings={**_HELP, "auto_envvar_prefix": "VLLM_EAGLE3_PATCH"},
    epilog=_examples(
        "vllm-eagle3-patch check --python /opt/venv",
        "vllm-eagle3-patch apply --verify --python /opt/venv",
        "vllm-eagle3-patch COMMAND --help      says more of one command",
    ),
)
@click.version_option(__version__, prog_name="vllm-eagle3-patch")
def cli() -> None:
    """Make EAGLE-3 work for the DeepSeek-V2 family on the vLLM that is already installed.

    check says what is missing, apply adds it, verify runs the result, and revert puts every
    original file back. Restart vLLM after apply and after revert.

    Every option can be set by an environment variable too: VLLM_EAGLE3_PATCH_CHECK_PYTHON is
    --python of check.
    """


def _options(*decorators: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(lambda f, option: option(f), reversed(decorators), function)

    return decorate


_folder = _Folder()
_output = _options(
    click.option("--json", is_flag=True, help="Print one JSON document."),
    click.option("--debug", is_flag=True, help="Show a traceback with an error."),
)
_where = _options(
    click.option(
        "--site-packages",
        type=_folder,
        metavar="DIR",
        help="Act on this folder; no interpreter is started.",
    ),
    click.option(
        "--python",
        type=_folder,
        metavar="PATH",
        help="Act on what this interpreter, or this venv's, would import.",
    ),
)
_selection = _options(
    click.option("--unpinned", is_flag=True, help="Allow files that are not in the matrix."),
    click.option(
        "--interface-only",
        is_flag=True,
        help="Add the interface where the engine cannot run the combination.",
    ),
    click.option(
        "--harden", is_flag=True, help="Also change models that already start, to be right."
    ),
    click.option(
        "--only",
        multiple=True,
        metavar="NAME",
        shell_complete=_completed_by("patches_beginning"),
        help="Only this patch (repeatable).",
    ),
    click.option(
        "--skip",
        multiple=True,
        metavar="NAME",
        shell_complete=_completed_by("patches_beginning"),
        help="Not this patch (repeatable).",
    ),
)


_models = click.option(
    "--model",
    multiple=True,
    metavar="NAME",
    shell_complete=_completed_by("models_beginning"),
    help="Decide by this architecture or model type only (repeatable).",
)


def _timeout(meaning: str) -> Callable[..., Any]:
    return click.option(
        "--timeout",
        type=click.IntRange(min=1, max=_LONGEST_TIMEOUT),
        default=_TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        help=meaning,
    )


@cli.command(
    short_help="Say whether EAGLE-3 works here, and what is missing.",
    epilog=_examples(
        "vllm-eagle3-patch check",
        "vllm-eagle3-patch check --model kimi_k25 --python /opt/venv",
        "vllm-eagle3-patch check --json --site-packages /opt/venv/lib/python3.12/site-packages",
    ),
)
@_where
@_selection
@_models
@click.option("--all", "everywhere", is_flag=True, help="Every installation on this host.")
@click.option(
    "--search",
    type=_folder,
    multiple=True,
    metavar="DIR",
    help="With --all: also look for environments below this folder (repeatable).",
)
@_output
def check(
    json: bool, debug: bool, everywhere: bool, search: tuple[Path, ...], **given: Any
) -> NoReturn:
    """Say whether EAGLE-3 works here for each model, and what is missing.

    With --all: a row for each vLLM in one of these places: the active environment ($VIRTUAL_ENV,
    $CONDA_PREFIX), this tool's own, those of vllm and python3* on $PATH, and $PYTHONPATH; .venv
    in the current directory; venvs at ~/*, ~/*/.venv, ~/*/venv, ~/venvs/* and ~/.venvs/*; the
    folders of virtualenvwrapper, pipx, uv's tools, pyenv and conda; /opt/* and /opt/*/*; the
    system's and the user's packages; what running processes have loaded, and the environments
    whose Python they run. No interpreter is started. The exit code is the highest of them.

    Exit code: 0 ready, 1 apply would make it work, or it looks ready and verify has to prove it,
    3 no vLLM, 4 cannot be patched or verify refuted it, 5 a file was changed by someone else,
    7 another run is busy, 8 a run was interrupted.
    """
    if everywhere or search:
        _check_all(everywhere, search, given, as_json=json, debug=debug)

    def run() -> Report:
        from vllm_eagle3_patch.commands.check import check

        report = check(_given_where(given), _given_options(given))
        return report._replace(options=_options_of_apply(given), named=_named(given))

    _run(run, as_json=json, debug=debug, command="check")


@cli.command(
    short_help="Run the code that EAGLE-3 needs, where the server would.",
    epilog=_examples(
        "vllm-eagle3-patch verify --python /opt/venv",
        "vllm-eagle3-patch verify --model kimi_k25 --timeout 600",
    ),
)
@_where
@_selection
@_models
@_timeout("Wait so long for the interpreter.")
@_output
def verify(json: bool, debug: bool, timeout: int, **given: Any) -> NoReturn:
    """Run the code that EAGLE-3 needs, in the interpreter that runs the server.

    It imports vLLM, which takes a while, and runs its models' own code on a few numbers: no
    weights, no GPU. What it showed of a content that is no release's is kept beside the package,
    for check; nothing else is written.

    Exit code: 0 proven, 1 apply would make it work, or not all is proven, 2 no interpreter was
    named, 3 vLLM cannot be imported, 6 what should work does not, else as for check.
    """

    def run() -> Report:
        from vllm_eagle3_patch.commands.verify import Verifying, verify

        with progress() as tell:
            verifying = Verifying(timeout, tell)
            report = verify(_given_where(given), _given_options(given), verifying)
        return report._replace(options=_options_of_apply(given), named=_named(given))

    _run(run, as_json=json, debug=debug, command="verify")


@cli.command(
    short_help="Make it work.",
    epilog=_examples(
        "vllm-eagle3-patch apply --dry-run --diff",
        "vllm-eagle3-patch apply --verify --python /opt/venv",
        "vllm-eagle3-patch apply --harden",
        "vllm-eagle3-patch apply --skip draft-attention-backend",
    ),
)
@_where
@_selection
@click.option("--dry-run", is_flag=True, help="Plan only; write nothing.")
@click.option("--diff", is_flag=True, help="Plan only; show the unified diff.")
@click.option("--force", is_flag=True, help="Also patch a file that someone else changed.")
@click.option(
    "--verify", is_flag=True, help="Run the result (see verify); put it all back if that fails."
)
@_timeout("With --verify: wait so long for the interpreter.")
@_output
def apply(
    *,
    json: bool,
    debug: bool,
    dry_run: bool,
    diff: bool,
    verify: bool,
    timeout: int,
    **given: Any,
) -> NoReturn:
    """Make EAGLE-3 work: change all files or none, keep the originals, check the result.

    Exit code: 0 done or nothing to do, 1 (dry run) there is something to do, 3 no vLLM,
    4 cannot be patched, 5 a file was changed by someone else, 6 the result was wrong and
    everything was put back, 7 could not write.
    """

    def run() -> Report:
        from vllm_eagle3_patch.commands.apply import apply
        from vllm_eagle3_patch.commands.verify import Verifying

        where, options = _given_where(given), _given_options(given)
        with progress() as tell:
            verifying = Verifying(timeout, tell) if verify else None
            return apply(where, options, dry_run=dry_run, show_diff=diff, verifying=verifying)

    _run(run, as_json=json, debug=debug, command="apply", dry_run=dry_run or diff)


@cli.command(
    short_help="Put every original file back, byte for byte.",
    epilog=_examples(
        "vllm-eagle3-patch revert --dry-run",
        "vllm-eagle3-patch revert --python /opt/venv",
    ),
)
@_where
@click.option("--dry-run", is_flag=True, help="Say what would be put back; write nothing.")
@click.option("--force", is_flag=True, help="Also put back a file that was edited since.")
@_output
def revert(json: bool, debug: bool, dry_run: bool, force: bool, **given: Any) -> NoReturn:
    """Put every original file back, byte for byte, with its mode, owner, times and link.

    Exit code: 0 done or nothing to do, 1 (dry run) there is something to do, 3 no vLLM,
    4 no original is kept here, 5 a file was edited since, 7 could not write.
    """

    def run() -> Report:
        from vllm_eagle3_patch.commands.revert import revert

        return revert(_given_where(given), force=force, dry_run=dry_run)

    _run(run, as_json=json, debug=debug, command="revert", dry_run=dry_run)


@cli.command(
    "diff",
    short_help="Show what apply would change, or has changed.",
    epilog=_examples(
        "vllm-eagle3-patch diff",
        "vllm-eagle3-patch diff --python /opt/venv > eagle3.patch",
        "patch -p1 --directory /opt/venv/lib/python3.12/site-packages < eagle3.patch",
    ),
)
@_where
@_selection
@_output
def show_diff(json: bool, debug: bool, **given: Any) -> NoReturn:
    """Show the unified diff that apply would make, or has made; for `patch -p1`.

    Exit code: 0 no difference, 1 a difference, above 1 as for check.
    """

    def run() -> Report:
        from vllm_eagle3_patch.commands.diff import diff

        return diff(_given_where(given), _given_options(given))

    _run(run, as_json=json, debug=debug, command="diff")


@cli.command(
    short_help="Show which releases of vLLM it is for.",
    epilog=_examples(
        "vllm-eagle3-patch matrix",
        "vllm-eagle3-patch matrix --release 0.17.1",
        "vllm-eagle3-patch matrix --json",
    ),
)
@click.option(
    "--release",
    metavar="VERSION",
    shell_complete=_completed_by("releases_beginning"),
    help="One release, with its pins.",
)
@_output
def matrix(json: bool, debug: bool, release: str | None) -> NoReturn:
    """Show the compatibility matrix: a row a release, a column a model."""

    def run() -> termination.Ending:
        from vllm_eagle3_patch.ground import matrix as pins

        if release is None:
            releases = pins.oldest_first()
            show = functools.partial(print_matrix, releases)
            return termination.Ending(0, lambda: pins.document(releases), show)
        one = pins.load(release)
        if one is None:
            message = f"no release {release} in the matrix"
            raise click.BadParameter(message, param_hint="--release")
        show = functools.partial(print_release, one)
        return termination.Ending(0, lambda: pins.document([one]), show)

    termination.run_to_end(run, command="matrix", as_json=json, debug=debug)


_SIZE = click.IntRange(min=1)


@cli.command(
    short_help="Say whether a target and a draft model fit.",
    epilog=_examples(
        "vllm-eagle3-patch doctor ./target ./draft",
        "vllm-eagle3-patch doctor ./target ./draft --release 0.17.1 -tp 8",
        'vllm-eagle3-patch doctor ./target ./draft --serve "vllm serve ... -tp 8"',
        "vllm-eagle3-patch doctor ./target ./draft --write-draft-config ./corrected",
        "vllm-eagle3-patch doctor --metrics http://localhost:8000/metrics",
    ),
)
@click.argument("target", required=False, shell_complete=_completed_by("files"))
@click.argument("draft", required=False, shell_complete=_completed_by("files"))
@_where
@click.option(
    "--release",
    metavar="VERSION",
    shell_complete=_completed_by("releases_beginning"),
    help="Read this release from the matrix instead.",
)
@click.option("--tensor-parallel-size", "-tp", type=_SIZE, metavar="N", help="As vLLM's own.")
@click.option("--pipeline-parallel-size", "-pp", type=_SIZE, metavar="N", help="As vLLM's own.")
@click.option("--data-parallel-size", "-dp", type=_SIZE, metavar="N", help="As vLLM's own.")
@click.option(
    "--decode-context-parallel-size", "-dcp", type=_SIZE, metavar="N", help="As vLLM's own."
)
@click.option("--max-model-len", metavar="TOKENS", help="As vLLM takes it: 131072, 128k, 128K.")
@click.option("--dtype", metavar="TYPE", help="As vLLM's own.")
@click.option("--kv-cache-dtype", metavar="TYPE", help="As vLLM's own.")
@click.option("--attention-backend", metavar="NAME", help="As vLLM's own.")
@click.option("--num-speculative-tokens", type=_SIZE, metavar="N", help="As vLLM's own.")
@click.option("--method", metavar="NAME", help="The speculative method, such as eagle3.")
@click.option(
    "--serve", metavar="COMMAND", help='Take the options from a whole "vllm serve ..." command.'
)
@click.option(
    "--convention",
    type=click.Choice(["boundary", "output"]),
    help="What the draft model's layer ids count, if you know.",
)
@click.option(
    "--write-draft-config",
    type=_folder,
    metavar="DIR",
    help="Write a corrected copy of the draft model's config, weights linked.",
)
@click.option(
    "--metrics",
    metavar="URL-or-FILE",
    shell_complete=_completed_by("files"),
    help="Read a server's counters.",
)
@click.option(
    "--previous",
    metavar="URL-or-FILE",
    shell_complete=_completed_by("files"),
    help="An earlier scrape: judge the interval.",
)
@_output
def doctor(json: bool, debug: bool, **given: Any) -> NoReturn:
    """Say before any weights load whether a target and a draft model will work together.

    TARGET and DRAFT: a folder with config.json (and safetensors files, of which the headers are
    read), a config.json, or a model id in the local Hugging Face cache. Other options are named
    as vLLM's own; what is not given is assumed as vLLM would, and said.

    Exit code: 0 ok, 1 risky (starts, may accept badly), 4 broken (does not start, or speculates
    to no effect), 2 a checkpoint cannot be read, 3 no vLLM.
    """

    def run() -> termination.Ending:
        from vllm_eagle3_patch.cli import doctor

        _doctor_usage(given)
        return doctor.run(_given_where(given), given)

    termination.run_to_end(run, command="doctor", as_json=json, debug=debug)


def _doctor_usage(given: dict[str, Any]) -> None:
    """Refuse what does not go together."""
    if given["release"] is not None and (given["site_packages"] or given["python"]):
        message = "names a release of the matrix: no --site-packages or --python goes with it"
        raise click.BadParameter(message, param_hint="--release")
    if given["draft"] is None and (given["target"] is not None or given["metrics"] is None):
        missing = "DRAFT" if given["target"] is not None else "TARGET and DRAFT"
        message = f"{missing} missing: name both checkpoints, or a server with --metrics"
        raise click.UsageError(message, click.get_current_context())
    if given["previous"] is not None and given["metrics"] is None:
        raise click.BadParameter("goes with --metrics", param_hint="--previous")
    if given["write_draft_config"] is not None and given["draft"] is None:
        message = "goes with TARGET and DRAFT"
        raise click.BadParameter(message, param_hint="--write-draft-config")


@cli.command(
    short_help="Print the script for completion in a shell.",
    epilog=_examples(
        'bash: eval "$(vllm-eagle3-patch completion bash)"     in ~/.bashrc',
        'zsh:  eval "$(vllm-eagle3-patch completion zsh)"      in ~/.zshrc, after compinit',
        "fish: vllm-eagle3-patch completion fish > \\",
        "          ~/.config/fish/completions/vllm-eagle3-patch.fish",
    ).replace("Examples:", "To install it:"),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> NoReturn:
    """Print the script that lets a shell complete commands, options and their values.

    Patches, models and releases are completed too. The program must be on PATH; bash must be
    4.4 or later.
    """

    def run() -> termination.Ending:
        from vllm_eagle3_patch.cli.completion import print_script

        return termination.Ending(0, dict, functools.partial(print_script, cli, shell))

    termination.run_to_end(run, command="completion", as_json=False, debug=False)


def main() -> NoReturn:
    """The program; ``__main__`` calls it."""
    gc.disable()  # It ends soon: collecting what parsing leaves takes longer than it is worth.
    cli(prog_name="vllm-eagle3-patch")
    raise AssertionError("click exits")


def _check_all(
    everywhere: bool, search: tuple[Path, ...], given: dict[str, Any], *, as_json: bool, debug: bool
) -> NoReturn:
    if not everywhere:
        message = "it goes with --all"
        raise click.BadParameter(message, param_hint="--search")
    if given["site_packages"] is not None or given["python"] is not None:
        message = "--all looks everywhere: it does not go with --site-packages or --python"
        raise click.UsageError(message)

    def run() -> termination.Ending:
        from vllm_eagle3_patch.commands.check_all import check_all

        found = check_all(_given_options(given), search)
        show = functools.partial(print_everywhere, found)
        return termination.Ending(found.exit_code, found.document, show)

    termination.run_to_end(run, command="check", as_json=as_json, debug=debug)


def _given_where(given: dict[str, Any]) -> Where:
    from vllm_eagle3_patch.installation.find import Where

    return Where(given["site_packages"], given["python"])


def _given_options(given: dict[str, Any]) -> Options:
    from vllm_eagle3_patch.assess.decision import Options
    from vllm_eagle3_patch.ground.family import FAMILY, select_models

    try:
        select_models(given.get("model", ()))
    except KeyError as error:
        called = (name for model in FAMILY for name in (model.architecture, *model.model_types))
        known = ", ".join(dict.fromkeys(called))
        message = f"no model of the family is called {error.args[0]}; there are {known}"
        raise click.BadParameter(message, param_hint="--model") from error
    _known_patches(*given["only"], *given["skip"])
    names = ("unpinned", "interface_only", "harden", "only", "skip", "force")
    chosen = {name: given[name] for name in names if name in given}
    return Options(models=given.get("model", ()), **chosen)


def _named(given: dict[str, Any]) -> tuple[str, ...]:
    """The architectures that ``--model`` names; none without it."""
    from vllm_eagle3_patch.ground.family import select_models

    return tuple(m.architecture for m in select_models(given["model"])) if given["model"] else ()


def _known_patches(*names: str) -> None:
    if not names:
        return
    from vllm_eagle3_patch.patches._discovery import all_patches

    known = [patch.name for patch in all_patches()]
    for name in names:
        if name not in known:
            message = f"no patch is called {name}; there are {', '.join(known)}"
            raise click.BadParameter(message, param_hint="--only / --skip")


def _options_of_apply(given: dict[str, Any]) -> tuple[str, ...]:
    """The selecting options of ``check`` and ``verify`` as ``apply`` takes them."""
    flags = ("unpinned", "interface_only", "harden")
    words = [f"--{name.replace('_', '-')}" for name in flags if given[name]]
    for option in ("only", "skip"):
        for name in given[option]:
            words += [f"--{option}", name]
    return tuple(words)


def _run(
    run: Callable[[], Report], *, as_json: bool, debug: bool, command: str, dry_run: bool = False
) -> NoReturn:
    termination.run_to_end(
        lambda: termination.Ending.of(run()),
        command=command,
        as_json=as_json,
        debug=debug,
        dry_run=dry_run,
    )
