"""``eagle3-allowlist`` on look-alikes of each layout of the list."""

from pathlib import Path

import pytest
from libcst.codemod import CodemodTest
from patch_checks import (
    LAYOUTS,
    Change,
    Layout,
    changed,
    check_patched,
    check_tabs,
    check_unchanged,
    refusal,
)

from vllm_eagle3_patch.family import FAMILY, MODEL_TYPES, select_models
from vllm_eagle3_patch.patches.eagle3_allowlist import AllowlistCodemod, Eagle3Allowlist, allowlists
from vllm_eagle3_patch.sources import Sources, parse

PATCH = Eagle3Allowlist()

# As in vLLM 0.16.0.
BEFORE = '''"""A speculative config look-alike."""


class SpeculativeConfig:
    def _verify_args(self):
        eagle3_target_supported = [
            "llama",
            "gpt_oss",
        ]
        if (
            self.method == "eagle3"
            and self.target_model_config
            and not any(
                supported_model in self.target_model_config.hf_text_config.model_type
                for supported_model in eagle3_target_supported
            )
        ):
            raise ValueError(f"Eagle3 is only supported for {eagle3_target_supported} models.")
        return self
'''

AFTER = '''"""A speculative config look-alike."""


class SpeculativeConfig:
    def _verify_args(self):
        eagle3_target_supported = [
            "llama",
            "gpt_oss",
            # vllm-eagle3-patch: eagle3-allowlist
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "kimi_k2",
            "kimi_k25",
            "kimi_vl",
            "deepseek_vl_v2",
            "glm_moe_dsa",
        ]
        if (
            self.method == "eagle3"
            and self.target_model_config
            and not any(
                supported_model in self.target_model_config.hf_text_config.model_type
                for supported_model in eagle3_target_supported
            )
        ):
            raise ValueError(f"Eagle3 is only supported for {eagle3_target_supported} models.")
        return self
'''

NAME = "eagle3_target_supported"
LIST = '[\n            "llama",\n            "gpt_oss",\n        ]\n'
OURS = AFTER[AFTER.index("            # vllm") : AFTER.index("        ]\n")]
TEST = BEFORE[BEFORE.index("            and not any(") : BEFORE.index("        ):\n")]


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = AllowlistCodemod

    def test_one_type_a_line(self) -> None:
        self.assertCodemod(BEFORE, AFTER)

    def test_all_on_one_line(self) -> None:
        self.assertCodemod(
            """
            supported = ["llama", "qwen"]
            assert any(name in config.model_type for name in supported)
            """,
            """
            supported = [
                "llama", "qwen",
                # vllm-eagle3-patch: eagle3-allowlist
                "deepseek_v2",
                "deepseek_v3",
                "deepseek_v32",
                "kimi_k2",
                "kimi_k25",
                "kimi_vl",
                "deepseek_vl_v2",
                "glm_moe_dsa",
            ]
            assert any(name in config.model_type for name in supported)
            """,
        )


def types(*names: str) -> str:
    return f"[{', '.join(map(repr, names))}]\n"


HOLDS = {
    "all types": types("llama", *MODEL_TYPES),
    "strings that the types contain": types("llama", "deepseek_v", "kimi_k2", "glm_moe"),
    "deepseek alone, by hand": types("deepseek", "kimi_k2", "glm_moe_dsa"),
    "a tuple, by hand": f"{MODEL_TYPES}\n",
}


@pytest.mark.parametrize("listed", HOLDS.values(), ids=HOLDS)
def test_a_list_that_admits_the_family_is_left_alone(listed: str) -> None:
    check_unchanged(PATCH, changed(BEFORE, (LIST, listed)))


def test_as_vllm_has_it_from_0_18_0_on_lacks_glm_only() -> None:
    native = changed(BEFORE, (LIST, types("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")))
    check_unchanged(PATCH, native, select_models(("deepseek_v2", "kimi_k2", "kimi_k25")))
    module = parse(native.encode(), "")
    assert not PATCH.holds(module, select_models(("glm_moe_dsa",)))


PATCHED = {
    "one line": (
        [(LIST, '["llama", "gpt_oss"]\n')],
        [('            "llama",\n            "gpt_oss",\n', '            "llama", "gpt_oss",\n')],
    ),
    "one line with a comma at the end": (
        [(LIST, '["llama", "gpt_oss",]\n')],
        [('            "llama",\n            "gpt_oss",\n', '            "llama", "gpt_oss",\n')],
    ),
    "one line with a comment": (
        [(LIST, '["llama", "gpt_oss"]  # text\n')],
        [
            ('            "llama",\n            "gpt_oss",\n', '            "llama", "gpt_oss",\n'),
            ("        ]\n", "        ]  # text\n"),
        ],
    ),
    "one type": (
        [(LIST, '["llama"]\n')],
        [('            "gpt_oss",\n', "")],
    ),
    "several a line": (
        [(LIST, '[\n            "llama", "gpt_oss",\n        ]\n')],
        [('"llama",\n            "gpt_oss"', '"llama", "gpt_oss"')],
    ),
    "no comma at the end": (
        [('"gpt_oss",\n', '"gpt_oss"\n')],
        [],
    ),
    "single quotes": ([('"llama"', "'llama'")], None),
    "another name": (
        [
            ("        eagle3_target_supported = [", "        aux_hidden_states_supported = ["),
            ("in eagle3_target_supported\n", "in aux_hidden_states_supported\n"),
            ('self.method == "eagle3"', 'self.method in ("eagle3", "extract_hidden_states")'),
            ("Eagle3 is only supported for", "{self.method} is only supported for"),
        ],
        None,
    ),
    "some types there": (
        [('"gpt_oss",\n', '"deepseek_v3",\n            "kimi_k2",\n')],
        [
            (
                '            "deepseek_v3",\n            "deepseek_v32"',
                '            "deepseek_v32"',
            ),
            ('            "kimi_k2",\n            "kimi_k25"', '            "kimi_k25"'),
            ('"gpt_oss",\n', '"deepseek_v3",\n            "kimi_k2",\n'),
        ],
    ),
    "comments beside the types": (
        [
            ('"llama",\n', '"llama",  # 2 to 4\n'),
            ("        ]\n", "            # the end\n        ]\n"),
        ],
        None,
    ),
    "comment beside the last type": ([('"gpt_oss",\n', '"gpt_oss",  # MoE\n')], None),
    "comment after the bracket": ([("= [\n", "= [  # by type\n")], None),
    "on a module's level": (
        [("class SpeculativeConfig:\n", 'OTHERS = ["llama"]\n\n\nclass SpeculativeConfig:\n')],
        None,
    ),
    "test on one line": (
        [(TEST, f"            and not any(t in c.model_type for t in {NAME})\n")],
        None,
    ),
}


@pytest.mark.parametrize(("before", "after"), PATCHED.values(), ids=PATCHED)
def test_other_layouts_are_patched(before: list[Change], after: list[Change] | None) -> None:
    """No changes for ``after`` of its own: the same ones as for ``before``."""
    expected = changed(AFTER, *(before if after is None else after))
    check_patched(PATCH, changed(BEFORE, *before).encode(), expected.encode())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(layout: Layout) -> None:
    check_patched(PATCH, layout(BEFORE), layout(AFTER))


def test_a_file_indented_with_tabs() -> None:
    check_tabs(PATCH, BEFORE, AFTER)


ANY = ("any(... in ....model_type ...)", "the module")
ASSIGNMENT = ("eagle3_target_supported = [...]", "the module")

REFUSED = {
    "two membership tests": ([(TEST, TEST * 2)], (*ANY, 2)),
    "no membership test": ([(TEST, "            and not self.supported()\n")], (*ANY, 0)),
    "a test of something else": ([("hf_text_config.model_type", "hf_text_config.name")], (*ANY, 0)),
    "a test of equal types": ([("supported_model in self", "supported_model == self")], (*ANY, 0)),
    "a list in the test": (
        [("in eagle3_target_supported\n", 'in ["llama"]\n')],
        (*ANY, 0),
    ),
    "a list of another object": (
        [("in eagle3_target_supported\n", "in self.supported\n")],
        (*ANY, 0),
    ),
    "the list renamed": (
        [("        eagle3_target_supported = [", "        listed = [")],
        (*ASSIGNMENT, 0),
    ),
    "a list in two parts": ([("        ]\n", "        ] + MORE\n")], (*ASSIGNMENT, 0)),
    "a tuple": ([(LIST, '("llama", "gpt_oss")\n')], (*ASSIGNMENT, 0)),
    "an annotated list": (
        [("eagle3_target_supported = [", "eagle3_target_supported: list[str] = [")],
        (*ASSIGNMENT, 0),
    ),
    "an empty list": ([(LIST, "[]\n")], (*ASSIGNMENT, 0)),
    "assigned twice": (
        [(LIST, f'{LIST}        eagle3_target_supported = ["llama"]\n')],
        (*ASSIGNMENT, 2),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BEFORE, *changes)) == expected


def test_two_membership_tests_are_no_answer_even_if_the_first_admits_the_family() -> None:
    second = changed(BEFORE, ("class SpeculativeConfig", "class Other")).replace(NAME, "narrower")
    assert not PATCH.holds(parse(f"{AFTER}\n\n{second}".encode(), ""))


@pytest.mark.parametrize("method", ["eagle3", "extract_hidden_states", "ngram"])
@pytest.mark.parametrize("text_type", sorted({t for model in FAMILY for t in model.text_types}))
def test_the_patched_config_accepts_the_family_for_each_method(method: str, text_type: str) -> None:
    gates_both = 'self.method in ("eagle3", "extract_hidden_states")'
    source = changed(BEFORE, ('self.method == "eagle3"', gates_both))
    patched = PATCH.apply(source.encode(), "speculative.py").decode()
    assert accepts(patched, method, text_type)
    assert accepts(source, method, text_type) == (method == "ngram")


@pytest.mark.parametrize("other", ["deepseek", "deepseek_v4", "mamba"])
def test_the_patched_config_still_refuses_others(other: str) -> None:
    """``deepseek`` alone is DeepSeek V1."""
    assert not accepts(AFTER, "eagle3", other)


def accepts(source: str, method: str, text_type: str) -> bool:
    names: dict[str, type] = {}
    exec(source, names)
    config = names["SpeculativeConfig"]()
    config.method = method
    text_config = type("TextConfig", (), {"model_type": text_type})
    config.target_model_config = type("ModelConfig", (), {"hf_text_config": text_config})
    try:
        config._verify_args()
    except ValueError:
        return False
    return True


def test_what_the_list_holds() -> None:
    assert allowlists(parse(BEFORE.encode(), "")) == [("llama", "gpt_oss")]
    assert allowlists(parse(b"any(x in y for x in z)\nany(z)", "")) == []


def test_the_file_where_it_limits_the_models(tmp_path: Path) -> None:
    path = "vllm/config/speculative.py"
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {path: b"method = 'eagle3'\n"})) == ()
    assert PATCH.paths(Sources(tmp_path, {path: BEFORE.encode()})) == (path,)
