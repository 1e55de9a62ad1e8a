"""The options of a whole ``vllm serve`` command line."""

from __future__ import annotations

import pytest

from vllm_eagle3_patch.doctor.serve_options import ServeError, ServeOptions, length, parse_serve

SPECULATIVE = """'{"method": "eagle3", "model": "d", "num_speculative_tokens": 4}'"""


def test_a_command_line_as_people_write_it() -> None:
    options = parse_serve(
        "VLLM_USE_V2_MODEL_RUNNER=1 CUDA_VISIBLE_DEVICES=0,1 vllm serve moonshotai/Kimi-K2 \\\n"
        "  --tensor-parallel-size=8 --pipeline_parallel_size 2 -dp 4 --max-model-len 128K \\\n"
        f"  --trust-remote-code --enable-expert-parallel --speculative-config {SPECULATIVE} \\\n"
        "  --kv-cache-dtype fp8 --dtype bfloat16 --attention-backend FLASHMLA"
    )
    assert options == ServeOptions(
        tensor_parallel_size=8,
        pipeline_parallel_size=2,
        data_parallel_size=4,
        max_model_len=131072,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        attention_backend="FLASHMLA",
        num_speculative_tokens=4,
        method="eagle3",
        draft_model="d",
        enable_expert_parallel=True,
        trust_remote_code=True,
        newer_runner=True,
        speculates=True,
    )


@pytest.mark.parametrize(
    "words",
    [
        "-tp 8",
        "-tp=8",
        "--tensor-parallel-size 8",
        "--tensor-parallel-size=8",
        "--tensor_parallel_size 8",
        "--tensor_parallel_size=8",
    ],
)
def test_spellings(words: str) -> None:
    assert parse_serve(f"vllm serve m {words}").tensor_parallel_size == 8


def test_dotted_keys() -> None:
    options = parse_serve(
        "vllm serve m --speculative-config.method eagle3 --speculative-config.model=d "
        "--speculative_config.num_speculative_tokens 5"
    )
    assert (options.method, options.draft_model, options.num_speculative_tokens) == (
        "eagle3",
        "d",
        5,
    )
    assert options.speculates


def test_older_and_nested_ways_to_say_the_same() -> None:
    options = parse_serve(
        "VLLM_ATTENTION_BACKEND=FLASHMLA VLLM_MLA_DISABLE=1 vllm serve m "
        "--speculative-model d --num-speculative-tokens 2 --kv-transfer-config.kv_role kv_both"
    )
    assert (options.attention_backend, options.mla_disabled) == ("FLASHMLA", True)
    assert (options.draft_model, options.num_speculative_tokens) == ("d", 2)
    assert options.kv_transfer_role == "kv_both"
    nested = """vllm serve m --attention-config '{"backend": "TRITON_MLA"}'"""
    assert parse_serve(nested).attention_backend == "TRITON_MLA"


@pytest.mark.parametrize(
    "before",
    [
        "cd /models && CUDA_VISIBLE_DEVICES=0 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m",
        "env VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m",
        "export VLLM_USE_V2_MODEL_RUNNER=0; vllm serve m",
        "nohup env VLLM_USE_V2_MODEL_RUNNER=0 python -m vllm.entrypoints.openai.api_server",
        "docker run -e VLLM_USE_V2_MODEL_RUNNER=0 vllm/vllm-openai --model m",
        "docker run --env=VLLM_USE_V2_MODEL_RUNNER=0 vllm/vllm-openai --model m",
    ],
)
def test_the_environment_stands_in_many_places(before: str) -> None:
    options = parse_serve(f"{before} -tp 8 --speculative-config {SPECULATIVE}")
    assert options.newer_runner is False
    assert options.tensor_parallel_size == 8
    assert options.speculates


def test_single_options_of_the_speculative_config() -> None:
    options = parse_serve("vllm serve m --spec-method eagle3 --spec-model d --spec-tokens 3")
    assert options.speculates
    assert (options.method, options.draft_model, options.num_speculative_tokens) == (
        "eagle3",
        "d",
        3,
    )


@pytest.mark.parametrize("option", ["-ac", "--attention-config"])
def test_the_attention_config_by_both_its_names(option: str) -> None:
    options = parse_serve(f"""vllm serve m {option} '{{"backend": "FLASHINFER_MLA"}}'""")
    assert options.attention_backend == "FLASHINFER_MLA"
    dotted = parse_serve(f"vllm serve m {option}.backend=FLASHINFER_MLA")
    assert dotted.attention_backend == "FLASHINFER_MLA"


def test_a_flag_does_not_take_the_next_word() -> None:
    options = parse_serve("vllm serve --enable-dbo m --trust-remote-code -tp 2")
    assert (options.enable_dbo, options.trust_remote_code, options.tensor_parallel_size) == (
        True,
        True,
        2,
    )


def test_no_speculative_config_is_noticed() -> None:
    assert parse_serve("vllm serve m").speculates is False
    assert ServeOptions().speculates is None
    # What a file of options says is not known.
    assert parse_serve("vllm serve m --config server.yaml -tp 8").speculates is None


def test_transfer_roles() -> None:
    assert parse_serve("vllm serve m").kv_transfer_role is None
    role = """vllm serve m --kv-transfer-config '{"kv_role": "kv_consumer"}'"""
    assert parse_serve(role).kv_transfer_role == "kv_consumer"
    assert parse_serve("vllm serve m --kv-transfer-config '{}'").kv_transfer_role == "unknown"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("128k", 128000),
        ("128K", 131072),
        ("1m", 1000000),
        ("auto", None),
        ("-1", None),
    ],
)
def test_lengths(text: str, tokens: int | None) -> None:
    assert length(text) == tokens


def test_options_given_one_by_one_go_before_the_command_line() -> None:
    line = parse_serve("vllm serve m -tp 8 --dtype half")
    assert ServeOptions(tensor_parallel_size=4).over(line) == ServeOptions(
        tensor_parallel_size=4, dtype="half", speculates=False
    )


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve 'open",
        "vllm serve m -tp x",
        "vllm serve m -tp 0",
        "vllm serve m -tp",
        "vllm serve m --speculative-config",
        "vllm serve m --speculative-config '{'",
        "vllm serve m --speculative-config '[]'",
        """vllm serve m --speculative-config '{"num_speculative_tokens": "x"}'""",
        """vllm serve m --speculative-config '{"num_speculative_tokens": true}'""",
        """vllm serve m --speculative-config '{"method": 5}'""",
        "vllm serve m --max-model-len many",
        "x" * 100_000,
    ],
)
def test_what_is_no_command_line(command: str) -> None:
    with pytest.raises(ServeError) as raised:
        parse_serve(command)
    assert raised.value.exit_code == 2
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("command", ["", "   ", "vllm", "-", "--", "= =", "--=x", "-tp=2 --x"])
def test_odd_command_lines_are_read_all_the_same(command: str) -> None:
    assert isinstance(parse_serve(command), ServeOptions)
