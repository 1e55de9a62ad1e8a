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

from vllm_eagle3_patch.ground.family import FAMILY, select_models
from vllm_eagle3_patch.patches.eagle3_allowlist import (
    MODEL_TYPES,
    AllowlistCodemod,
    Eagle3Allowlist,
)
from vllm_eagle3_patch.vllm_source.allowlist import allowlists
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

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

# As in vLLM 0.10.0.
STRING_BEFORE = '''"""A config look-alike."""


class SpeculativeConfig:

    def _verify_args(self):
        if self.method == "eagle3" and self.target_model_config and \\
            "llama" not in self.target_model_config.hf_text_config.model_type:
            raise ValueError(
                "Eagle3 is only supported for Llama models. "
                f"Got {self.target_model_config.hf_text_config.model_type=}")

        return self
'''

STRING_AFTER = '''"""A config look-alike."""


class SpeculativeConfig:

    def _verify_args(self):
        # vllm-eagle3-patch: eagle3-allowlist
        eagle3_target_supported = [
            "llama",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "kimi_k2",
            "kimi_k25",
            "kimi_vl",
            "deepseek_vl_v2",
            "glm_moe_dsa",
        ]
        if self.method == "eagle3" and self.target_model_config and \\
            not any(
                supported_model in self.target_model_config.hf_text_config.model_type
                for supported_model in eagle3_target_supported
            ):
            raise ValueError(
                f"Eagle3 is only supported for {eagle3_target_supported} models. "
                f"Got {self.target_model_config.hf_text_config.model_type=}")

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

    def test_one_string(self) -> None:
        self.assertCodemod(STRING_BEFORE, STRING_AFTER)

    def test_all_on_one_line(self) -> None:
        self.assertCodemod(
            """
            supported = ["llama", "qwen"]
            if not any(name in config.model_type for name in supported): raise ValueError
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
            if not any(name in config.model_type for name in supported): raise ValueError
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


CONDITION = STRING_BEFORE[
    STRING_BEFORE.index("        if self") : STRING_BEFORE.index("model_type:")
]
STRING_CONDITION = 'and \\\n            "llama"'
MESSAGE = '"Eagle3 is only supported for Llama models. "'
LLAMA_MODELS = "supported for {eagle3_target_supported} models. "
IN_CONFIG = "self.target_model_config.hf_text_config.model_type"
GOT = f'\n                f"Got {{{IN_CONFIG}=}}"'

STRINGS_PATCHED = {
    "in brackets": (
        [(STRING_CONDITION, STRING_CONDITION[:-7] + '("llama"'), ("model_type:", "model_type):")],
        [("not any(", "(not any("), ("            ):", "            )):")],
    ),
    "comments": (
        [
            ("        if self", "        # no others yet\n        if self"),
            ('                f"Got', '                # which\n                f"Got'),
        ],
        None,
    ),
    "blank line above": (
        [("        if self", "        self.check()\n\n        if self")],
        [("        # vllm", "        self.check()\n\n        # vllm")],
    ),
    "single quotes": (
        [('"llama"', "'llama'"), (MESSAGE, MESSAGE.replace('"', "'"))],
        [
            ('"llama"', "'llama'"),
            (f'f"Eagle3 is only {LLAMA_MODELS}"', f"f'Eagle3 is only {LLAMA_MODELS}'"),
        ],
    ),
    "a shorter message": ([(GOT, "")], None),
    "another string": ([('"llama"', '"vicuna"')], None),
    "the same test elsewhere in the file": (
        [
            (
                "class SpeculativeConfig:\n",
                "class ModelConfig:\n\n    def is_llama(self):\n"
                '        return "llama" not in self.hf_text_config.model_type\n\n\n'
                "class SpeculativeConfig:\n",
            )
        ],
        None,
    ),
}


@pytest.mark.parametrize(("before", "after"), STRINGS_PATCHED.values(), ids=STRINGS_PATCHED)
def test_other_layouts_of_one_string_are_patched(
    before: list[Change], after: list[Change] | None
) -> None:
    """No changes for ``after`` of its own: the same ones as for ``before``."""
    expected = changed(STRING_AFTER, *(before if after is None else after))
    check_patched(PATCH, changed(STRING_BEFORE, *before).encode(), expected.encode())


EACH_FORM = pytest.mark.parametrize(
    ("before", "after"), [(BEFORE, AFTER), (STRING_BEFORE, STRING_AFTER)], ids=["list", "string"]
)


@EACH_FORM
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(layout: Layout, before: str, after: str) -> None:
    check_patched(PATCH, layout(before), layout(after))


@EACH_FORM
def test_a_file_indented_with_tabs(before: str, after: str) -> None:
    check_tabs(PATCH, before, after)


WHERE = "class SpeculativeConfig"
ANY = ('any(... in ....model_type ...) or "..." not in ....hf_text_config.model_type', WHERE)
ASSIGNMENT = ("eagle3_target_supported = [...]", WHERE)

REFUSING = ("if ... not any(... in ....model_type ...): raise", "class SpeculativeConfig")

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
    "a list that denies": ([("not any(", "any(")], (*REFUSING, 0)),
    "a list whose absence is logged": ([("raise ValueError(", "logger.info(")], (*REFUSING, 0)),
    "assigned twice": (
        [(LIST, f'{LIST}        eagle3_target_supported = ["llama"]\n')],
        (*ASSIGNMENT, 2),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BEFORE, *changes)) == expected


IF = 'if ... "llama" not in ...'
ONLY_LLAMA = '"... is only supported for Llama models"'

STRINGS_REFUSED = {
    "two tests": (
        [("self.target_model_config and", f'"qwen" not in {IN_CONFIG} and')],
        (*ANY, 2),
    ),
    "a list and a string": (
        [
            (
                "        return self",
                f"        any(t in c.model_type for t in {NAME})\n        return self",
            )
        ],
        (*ANY, 2),
    ),
    "an equal type": ([('"llama" not in', '"llama" !=')], (*ANY, 0)),
    "an admitted type": ([('"llama" not in', '"llama" in')], (*ANY, 0)),
    "a string of another object": ([('"llama" not in', "self.supported not in")], (*ANY, 0)),
    "another config": ([("hf_text_config.model_type:", "hf_config.model_type:")], (*ANY, 0)),
    "a condition of its own": (
        [
            (
                CONDITION + "model_type:",
                f'        refused = "llama" not in {IN_CONFIG}\n        if refused:',
            )
        ],
        (IF, WHERE, 0),
    ),
    "an elif": (
        [("        if self", "        if self.quick:\n            return self\n        elif self")],
        (IF, WHERE, 0),
    ),
    "another message": ([("for Llama models", "for some models")], (ONLY_LLAMA, WHERE, 0)),
    "the message made elsewhere": ([(f"                {MESSAGE}\n", "")], (ONLY_LLAMA, WHERE, 0)),
    "the message twice": (
        [(MESSAGE, f"{MESSAGE}\n                {MESSAGE}")],
        (ONLY_LLAMA, WHERE, 2),
    ),
    "a list of that name": (
        [("        if self", f'        {NAME} = ["llama"]\n        if self')],
        (f"{WHERE} without {NAME}", "the module", 0),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), STRINGS_REFUSED.values(), ids=STRINGS_REFUSED)
def test_an_unknown_form_of_one_string_is_refused(
    changes: list[Change], expected: tuple[str, str, int]
) -> None:
    assert refusal(PATCH, changed(STRING_BEFORE, *changes)) == expected


def test_strings_admitted_one_by_one_by_hand_are_left_alone() -> None:
    by_hand = "".join(f' and \\\n            "{t}" not in {IN_CONFIG}' for t in MODEL_TYPES)
    source = changed(STRING_BEFORE, ("model_type:\n", f"model_type{by_hand}:\n"))
    check_unchanged(PATCH, source)
    half = changed(source, (f' and \\\n            "kimi_k2" not in {IN_CONFIG}', ""))
    half = changed(half, (f' and \\\n            "kimi_k25" not in {IN_CONFIG}', ""))
    assert not PATCH.holds(parse(half.encode(), ""))


def test_strings_that_must_all_be_there_admit_nobody() -> None:
    """``or`` between them: one that is not there is enough to be refused."""
    by_hand = "".join(f' or \\\n            "{t}" not in {IN_CONFIG}' for t in MODEL_TYPES)
    source = changed(STRING_BEFORE, ("model_type:\n", f"model_type{by_hand}:\n"))
    assert not PATCH.holds(parse(source.encode(), ""))


def test_two_membership_tests_are_no_answer_even_if_the_first_admits_the_family() -> None:
    second = changed(BEFORE, ("class SpeculativeConfig", "class Other")).replace(NAME, "narrower")
    assert not PATCH.holds(parse(f"{AFTER}\n\n{second}".encode(), ""))


@pytest.mark.parametrize("text_type", sorted({t for model in FAMILY for t in model.text_types}))
def test_the_patched_config_accepts_the_family_where_it_accepted_one_string(text_type: str) -> None:
    assert accepts(STRING_AFTER, "eagle3", text_type)
    assert not accepts(STRING_BEFORE, "eagle3", text_type)
    for source in (STRING_BEFORE, STRING_AFTER):
        assert accepts(source, "eagle3", "llama4")
        assert accepts(source, "eagle", text_type)


@pytest.mark.parametrize("other", ["deepseek", "mamba"])
def test_the_patched_config_refuses_others_and_says_whom_it_accepts(other: str) -> None:
    with pytest.raises(
        ValueError, match=r"only supported for \['llama', 'deepseek_v2', .*Got .*"
    ) as e:
        verify(STRING_AFTER, "eagle3", other)
    assert str(e.value).endswith(f"model_type={other!r}")


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
    try:
        verify(source, method, text_type)
    except ValueError:
        return False
    return True


def verify(source: str, method: str, text_type: str) -> None:
    names: dict[str, type] = {}
    exec(source, names)
    config = names["SpeculativeConfig"]()
    config.method = method
    text_config = type("TextConfig", (), {"model_type": text_type})
    config.target_model_config = type("ModelConfig", (), {"hf_text_config": text_config})
    config._verify_args()


def test_what_the_list_holds() -> None:
    assert allowlists(parse(BEFORE.encode(), "")) == [("llama", "gpt_oss")]
    assert allowlists(parse(STRING_BEFORE.encode(), "")) == [("llama",)]
    assert allowlists(parse(STRING_AFTER.encode(), "")) == [("llama", *MODEL_TYPES)]
    assert allowlists(parse(b"if not x:\n    any(y)\nif 'a' not in b.model_type:\n    c", "")) == []
    assert allowlists(parse(b"any(x in y for x in z)\nany(z)", "")) == []


@pytest.mark.parametrize(
    "path",
    ["vllm/config/speculative.py", "vllm/config/__init__.py", "vllm/config.py"],
    ids=["0.11.0 on", "0.10.1 and 0.10.2", "up to 0.10.0"],
)
def test_the_file_where_it_limits_the_models(tmp_path: Path, path: str) -> None:
    other = b"raise ValueError(f'{name} is only supported for vision models')\n"
    assert PATCH.paths(Sources(tmp_path, {path: other})) == ()
    assert PATCH.paths(Sources(tmp_path, {path: STRING_BEFORE.encode()})) == (path,)
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {path: b"method = 'eagle3'\n"})) == ()
    assert PATCH.paths(Sources(tmp_path, {path: BEFORE.encode()})) == (path,)


def test_a_refusal_in_other_words_is_a_refusal(tmp_path: Path) -> None:
    """The test of the model type is what limits EAGLE-3, not the message."""
    path = "vllm/config/speculative.py"
    for source in (BEFORE, STRING_BEFORE):
        reworded = changed(source, ("is only supported for", "works with"))
        assert PATCH.paths(Sources(tmp_path, {path: reworded.encode()})) == (path,)
        assert not PATCH.holds(parse(reworded.encode(), ""))
    reworded = changed(BEFORE, ("is only supported for", "works with"))
    assert PATCH.holds(parse(PATCH.apply(reworded.encode(), path), ""))


@pytest.mark.parametrize(
    "change",
    [
        (TEST, "            and not self.supported(c.hf_text_config.model_type)\n"),
        (TEST, '            and c.hf_text_config.model_type == "mamba"\n'),
        ('"eagle3"', '"medusa"'),
    ],
    ids=["no such test", "a test of one type", "of another method"],
)
def test_a_config_that_tests_for_something_else_limits_nobody(
    tmp_path: Path, change: Change
) -> None:
    path = "vllm/config/speculative.py"
    source = changed(BEFORE, ("Eagle3 is only supported for", "No"), change)
    source = source.replace("eagle3_target_supported", "supported")
    assert PATCH.paths(Sources(tmp_path, {path: source.encode()})) == ()


NAMED_ELSEWHERE = {
    "above the class": ("class SpeculativeConfig", f"{NAME} = %s\n\n\nclass SpeculativeConfig"),
    "in another class": (
        "class SpeculativeConfig",
        f"class Other:\n    {NAME} = %s\n\n\nclass SpeculativeConfig",
    ),
    "on the class": ("    def _verify", f"    {NAME} = %s\n\n    def _verify"),
    "in another method": (
        "    def _verify",
        f"    def other(self):\n        {NAME} = %s\n\n    def _verify",
    ),
    "on the object": ("        eagle3_target", f"        self.{NAME} = %s\n        eagle3_target"),
}


@pytest.mark.parametrize("change", NAMED_ELSEWHERE.values(), ids=NAMED_ELSEWHERE)
def test_a_list_of_that_name_elsewhere_does_not_count(change: Change) -> None:
    old, new = change
    decoy = changed(BEFORE, (old, new % types(*MODEL_TYPES).strip()))
    assert not PATCH.holds(parse(decoy.encode(), ""))
    narrow = changed(AFTER, (old, new % '["llama"]'))
    assert PATCH.holds(parse(narrow.encode(), ""))


@pytest.mark.parametrize("listed", ['["llama"]', types(*MODEL_TYPES).strip()])
def test_a_list_assigned_twice_is_no_answer(listed: str) -> None:
    twice = changed(AFTER, ("        if (\n", f"        {NAME} = {listed}\n        if (\n"))
    refusal(PATCH, twice)


def test_a_list_of_the_module_that_the_test_goes_through() -> None:
    for listed, holds in ((types(*MODEL_TYPES), True), ('["llama"]\n', False)):
        source = changed(BEFORE, (f"        {NAME} = {LIST}", ""))
        source = f"{NAME} = {listed}\n\n{source}"
        assert PATCH.holds(parse(source.encode(), "")) is holds


def test_a_list_that_is_nowhere_admits_nobody() -> None:
    source = changed(AFTER, (f"        {NAME} = [", "        listed = ["))
    refusal(PATCH, source)


def test_an_annotated_list_by_hand_is_left_alone() -> None:
    listed = f"{NAME}: list[str] = {types('llama', *MODEL_TYPES)}"
    check_unchanged(PATCH, changed(BEFORE, (f"{NAME} = {LIST}", listed)))
