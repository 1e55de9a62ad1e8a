"""Questions asked of a parsed source."""

import ast

import pytest

from vllm_eagle3_patch import reading

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
    found = reading.find_class(MODULE, "Inner")
    assert found is not None
    assert found.name == "Inner"
    assert reading.find_class(MODULE, "Outer") is None
    assert reading.find_class(MODULE, "run") is None


def test_a_method_is_a_class_s_own() -> None:
    owner = reading.find_class(MODULE, "Inner")
    run, wait = reading.find_method(owner, "run"), reading.find_method(owner, "wait")
    assert isinstance(run, ast.FunctionDef)
    assert isinstance(wait, ast.AsyncFunctionDef)
    assert reading.find_method(owner, "nested") is None
    assert reading.find_method(reading.find_class(MODULE, "Inner2"), "run") is None
    assert reading.find_method(None, "run") is None


@pytest.mark.parametrize("name", ["outside", "run", "wait", "nested"])
def test_a_function_is_found_wherever_it_is(name: str) -> None:
    found = reading.find_function(MODULE, name)
    assert found is not None
    assert found.name == name


def test_a_class_is_no_function() -> None:
    assert reading.find_function(MODULE, "Inner") is None


def test_bases_by_their_last_name() -> None:
    owner = reading.find_class(MODULE, "Inner")
    assert owner is not None
    assert reading.base_names(owner) == ("Module", "Base", "")


@pytest.mark.parametrize(
    ("source", "name"),
    [("a.b.c", "c"), ("a", "a"), ("a.b()", ""), ("a[0]", ""), ("f().b", "b"), ("'a'", "")],
)
def test_the_last_name_of_an_expression(source: str, name: str) -> None:
    assert reading.last_name(ast.parse(source, mode="eval").body) == name


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
    assert reading.mentions(ast.parse(source), "ids") is expected


def test_strings_anywhere_but_no_bytes_and_numbers() -> None:
    module = ast.parse('x = ["a", ("b", b"c", 1)]\nf(k="d")  # "e"\n')
    assert sorted(reading.strings(module)) == ["a", "b", "d"]


def test_calls_by_the_last_name() -> None:
    module = ast.parse("cat(1)\ntorch.cat(2)\nf(cat(3))\ncat.f(4)\ncat\n")
    arguments = [ast.unparse(call.args[0]) for call in reading.calls(module, "cat")]
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
    assert reading.appends_to(ast.parse(source), "states") is expected


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
    assert reading.same(node, "self.runner.groups[0][0]") is expected


SETTER = "    def set_aux_hidden_state_layers(self, layers): pass\n"
GETTER = "    def get_eagle3_aux_hidden_state_layers(self): pass\n"
LATER_GETTER = "    def get_eagle3_default_aux_hidden_state_layers(self): pass\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"class M(Module, SupportsEagle3):\n{SETTER}{GETTER}", True),
        (f"class M(interfaces.SupportsEagle3):\n{SETTER}{LATER_GETTER}", True),
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
    assert reading.implements_eagle3(reading.find_class(ast.parse(source), "M")) is expected


def test_no_class_implements_nothing() -> None:
    assert not reading.implements_eagle3(None)
