"""Questions asked of a parsed source."""

import ast

import pytest

from vllm_eagle3_patch.vllm_source import syntax

MODULE = ast.parse(
    '''
def outside(): pass

if True:
    class Inner(nn.Module, a.b.Base, Generic[T], metaclass=Meta):
        """Doc."""

        def run(self):
            def nested(): pass
            self.states.append(states[0])
            return "text", f"in {name} out"

        async def wait(self): pass

class Inner2(Inner): pass
'''
)


def test_a_class_is_found_wherever_it_is() -> None:
    found = syntax.find_class(MODULE, "Inner")
    assert found is not None
    assert found.name == "Inner"
    assert syntax.find_class(MODULE, "Outer") is None
    assert syntax.find_class(MODULE, "run") is None


def test_a_method_is_a_class_s_own() -> None:
    owner = syntax.find_class(MODULE, "Inner")
    run, wait = syntax.find_method(owner, "run"), syntax.find_method(owner, "wait")
    assert isinstance(run, ast.FunctionDef)
    assert isinstance(wait, ast.AsyncFunctionDef)
    assert syntax.find_method(owner, "nested") is None
    assert syntax.find_method(syntax.find_class(MODULE, "Inner2"), "run") is None
    assert syntax.find_method(None, "run") is None


@pytest.mark.parametrize("name", ["outside", "run", "wait", "nested"])
def test_a_function_is_found_wherever_it_is(name: str) -> None:
    found = syntax.find_function(MODULE, name)
    assert found is not None
    assert found.name == name


def test_a_class_is_no_function() -> None:
    assert syntax.find_function(MODULE, "Inner") is None


def test_bases_by_their_last_name() -> None:
    owner = syntax.find_class(MODULE, "Inner")
    assert owner is not None
    assert syntax.base_names(owner) == ("Module", "Base", "")


@pytest.mark.parametrize(
    ("source", "name"),
    [("a.b.c", "c"), ("a", "a"), ("a.b()", ""), ("a[0]", ""), ("f().b", "b"), ("'a'", "")],
)
def test_the_last_name_of_an_expression(source: str, name: str) -> None:
    assert syntax.last_name(ast.parse(source, mode="eval").body) == name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x in self.ids", True),
        ("ids = 1", True),
        ("f(x, [ids])", True),
        ("'ids'", False),
        ("def ids(): pass", False),
        ("self.idss", False),
    ],
)
def test_a_name_is_mentioned_where_it_is_used(source: str, expected: bool) -> None:
    assert syntax.mentions(ast.parse(source), "ids") is expected


def test_strings_anywhere_but_no_bytes_and_numbers() -> None:
    module = ast.parse('x = ["a", ("b", b"c", 1)]\nf(k="d")  # "e"\n')
    assert sorted(syntax.strings(module)) == ["a", "b", "d"]


def test_calls_by_the_last_name() -> None:
    module = ast.parse("cat(1)\ntorch.cat(2)\nf(cat(3))\ncat.f(4)\ncat\n")
    arguments = [ast.unparse(call.args[0]) for call in syntax.calls(module, "cat")]
    assert sorted(arguments) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("states.append(1)", True),
        ("self.states.append(1)", True),
        ("if a:\n    states.append(1)", True),
        ("states.extend(1)", False),
        ("others.append(states)", False),
        ("append(states)", False),
        ("states[0].append(1)", False),
    ],
)
def test_an_append_to_a_list_of_this_name(source: str, expected: bool) -> None:
    assert syntax.appends_to(ast.parse(source), "states") is expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("self.runner.groups[0][0]", True),
        ("self . runner.groups[\n0][ 0 ]", True),
        ("(self.runner.groups)[0][0]", True),
        ("self.runner.groups[0][1]", False),
        ("self.runner.groups[0]", False),
        ("runner.groups[0][0]", False),
    ],
)
def test_the_same_expression_whatever_its_layout(source: str, expected: bool) -> None:
    node = ast.parse(f"({source})", mode="eval").body
    assert syntax.same(node, "self.runner.groups[0][0]") is expected


IMPORT = "from .interfaces import SupportsEagle3\n"
SETTER = "    def set_aux_hidden_state_layers(self, layers): self.layers = layers\n"
GETTER = "    def get_eagle3_aux_hidden_state_layers(self): return 2, 30, 58\n"
LATER_GETTER = "    def get_eagle3_default_aux_hidden_state_layers(self): return 2, 30, 58\n"
CLASS = f"class M(SupportsEagle3):\n{SETTER}{GETTER}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"class M(Module, SupportsEagle3):\n{SETTER}{GETTER}", True),
        (f"class M(SupportsEagle3):\n{SETTER}{LATER_GETTER}", True),
        (f"class M(SupportsEagle3):\n{SETTER}{GETTER}{LATER_GETTER}", True),
        (f"class M(SupportsEagle):\n{SETTER}{GETTER}", False),
        (f"class M(SupportsEagle3):\n{GETTER}", False),
        (f"class M(SupportsEagle3):\n{SETTER}", False),
        ("class M(SupportsEagle3): pass", False),
        (f"class M:\n{SETTER}{GETTER}", False),
    ],
    ids=[
        "as in 0.17.1",
        "as in 0.18.0",
        "both getters",
        "another protocol",
        "no setter",
        "no getter",
        "neither",
        "no base",
    ],
)
def test_the_interface_is_a_base_and_two_methods(source: str, expected: bool) -> None:
    assert implements(IMPORT + source) is expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (IMPORT + CLASS, True),
        (f"if NEW:\n    {IMPORT}{CLASS}", True),
        ("from .others import Eagle3 as SupportsEagle3\n" + CLASS, True),
        ("class SupportsEagle3(Protocol): pass\n" + CLASS, True),
        ("from . import interfaces\n" + CLASS.replace("(S", "(interfaces.S"), True),
        ("import vllm.interfaces\n" + CLASS.replace("(S", "(vllm.interfaces.S"), True),
        (CLASS, False),
        (CLASS.replace("(S", "(interfaces.S"), False),
        ("from .interfaces import SupportsEagle\n" + CLASS, False),
        ("from .interfaces import SupportsEagle3 as Eagle3\n" + CLASS, False),
        (f"def f():\n    {IMPORT}{CLASS}", False),
    ],
    ids=[
        "imported",
        "imported under a condition",
        "imported under this name",
        "a class of the module",
        "a module imported",
        "a module imported by its whole name",
        "neither",
        "no such module",
        "another protocol imported",
        "imported under another name",
        "imported in a function",
    ],
)
def test_a_base_counts_where_its_name_is_known(source: str, expected: bool) -> None:
    assert implements(source) is expected
    assert implements(source, protocol=False)


EMPTY = {
    "pass": "pass",
    "dots": "...",
    "a docstring": "'Set them.'",
    "a docstring and pass": "'Set them.'; pass",
    "an error": "raise NotImplementedError",
}


@pytest.mark.parametrize("body", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("protocol", [True, False])
def test_a_method_that_does_nothing_is_no_method(body: str, protocol: bool) -> None:
    for done in ("self.layers = layers", "return 2, 30, 58"):
        assert done in CLASS
        assert not implements(IMPORT + CLASS.replace(done, body), protocol=protocol)


@pytest.mark.parametrize(
    "body", ["return", "return None", "self.ids()", "f = lambda: 1", "x = 1; return"]
)
def test_a_getter_that_returns_nothing_is_no_getter(body: str) -> None:
    assert not implements(IMPORT + CLASS.replace("return 2, 30, 58", body))


def test_a_getter_whose_helper_returns_is_no_getter() -> None:
    helper = "\n        def f():\n            return 1"
    assert not implements(IMPORT + CLASS.replace(" return 2, 30, 58", helper))


def test_no_class_implements_nothing() -> None:
    assert not syntax.implements_eagle3(MODULE, None)


def implements(source: str, *, protocol: bool = True) -> bool:
    module = ast.parse(source)
    return syntax.implements_eagle3(module, syntax.find_class(module, "M"), protocol=protocol)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b.c = 1", ["a", "b.c"]),
        ("a: int = 1", ["a"]),
        ("a: int", []),
        ("a += 1", []),
        ("f(a)", []),
    ],
)
def test_what_a_statement_gives_a_value_to(source: str, expected: list[str]) -> None:
    (statement,) = ast.parse(source).body
    assert [ast.unparse(target) for target in syntax.assigned(statement)] == expected


def test_a_scope_ends_where_another_begins() -> None:
    source = "a\nif b:\n    c\ndef f():\n    d\nclass C:\n    e\nlambda: g\n"
    nodes = syntax.within_scope(ast.parse(source))
    assert [node.id for node in nodes if isinstance(node, ast.Name)] == ["a", "b", "c"]
