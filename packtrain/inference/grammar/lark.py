"""Converts GBNF rules to llguidance's notation, with the largest lexemes that read the same texts.

Parts without recursion are regular and become one lexeme, a regular expression, which makes masks quick. Where the
longest lexeme would swallow text that belongs to the next one (see lexer), a lexeme is one character."""

from collections.abc import Mapping
from itertools import groupby

from packtrain.inference.grammar import nodes as grammar_nodes
from packtrain.inference.grammar.lexer import ANY_CHAR, conflicting_lexemes, follow_sets
from packtrain.inference.grammar.nodes import CharSet, ChoiceNode, Node, SequenceNode, parts_of
from packtrain.inference.grammar.vocabulary_table import LARK_HEADER

MAX_GROUP_DEPTH = 120  # half of what Rust reads, which counts the groups' contents, too
NONEMPTY = " & /(?s:.+)/"
MOST_TEXT = 1 << 20  # characters of the rules in a lexeme


def to_lark(rules: grammar_nodes.GrammarRules) -> str:
    """Convert GBNF rules (nodes by rule name) to a text in the Lark notation that llguidance compiles."""
    lexeme_builder = _LexemeBuilder(rules)
    while True:
        lexeme_rules = lexeme_builder.build_rules()
        definitions, extensions = lexeme_builder.definitions(), list[str]()
        for index, followers in enumerate(follow_sets(lexeme_rules, len(definitions))):
            if followers:
                extensions.append(f"T{index} /{lexeme_builder.head_characters(followers)}/")
        conflicts = conflicting_lexemes(definitions, extensions) if extensions else []
        large = [n for n in conflicts if not isinstance(lexeme_builder.nodes[n], CharSet)]
        if not large:
            return _format_grammar(lexeme_rules, definitions)
        for lexeme_index in large:
            lexeme_builder.divide_lexeme(lexeme_index)


class _LexemeBuilder:
    """Divides a grammar into lexemes (`nodes`, each read at once by one regular expression) and rules over them."""

    def __init__(self, rules: grammar_nodes.GrammarRules) -> None:
        self.rules, self.nodes = rules, list[Node]()
        self._heads = grammar_nodes.rule_heads(rules)
        self._divided_nodes, self._group_nodes = set[Node](), dict[tuple[Node, ...], Node]()
        self._equal_nodes = list[list[Node]]()
        self._numbers: dict[str, int] = {}
        self.texts: dict[str, str] = {}  # of regular rules, as regular expressions
        self.rule_depths: dict[str, int] = {}
        for rule_name in grammar_nodes.dependency_order(rules):
            if self.is_regular(rules[rule_name]):
                self.texts[rule_name] = node_regex(rules[rule_name], self.texts)
                self.rule_depths[rule_name] = self.group_depth(rules[rule_name])

    def is_regular(self, *nodes: Node) -> bool:
        """Return whether one regular expression can read the nodes: no recursion, no tokens, not too large."""
        references = [reference for node in nodes for reference in grammar_nodes.names_in(node)]
        if any(reference.rule_name not in self.texts for reference in references) or any(
            map(grammar_nodes.has_token, nodes)
        ):
            return False
        num_chars = sum(len(self.texts[reference.rule_name]) for reference in references)
        return num_chars <= MOST_TEXT and max(map(self.group_depth, nodes)) <= MAX_GROUP_DEPTH

    def group_depth(self, node: Node) -> int:
        """Return how deep the groups in a node's regular expression are nested."""
        if isinstance(node, grammar_nodes.RuleReference):
            return self.rule_depths[node.rule_name]
        return 1 + max(map(self.group_depth, parts_of(node)), default=0)

    def divide_lexeme(self, lexeme_index: int) -> None:
        """Mark a lexeme, given by its index, to be divided: the next `build_rules` reads its parts one by one."""
        self._divided_nodes.update(self._equal_nodes[lexeme_index])

    def build_rules(self) -> grammar_nodes.GrammarRules:
        """Return the rules that `root` reaches, with lexemes as leaves; numbers these lexemes anew in `nodes`."""
        self.nodes, self._equal_nodes, self._numbers = [], [], {}
        read, waiting = grammar_nodes.GrammarRules(), ["root"]
        while waiting:
            name = waiting.pop()
            if name not in read:
                read[name] = self._read(self.rules[name])
                waiting += [reference.rule_name for reference in grammar_nodes.names_in(read[name])]
        return read

    def _read(self, node: Node) -> Node:
        """Convert a node of the grammar into a node whose leaves are lexemes, each as large as it may be."""
        if self._is_undivided(node):
            return self._lexeme_node(node)
        if isinstance(node, SequenceNode | ChoiceNode):
            built_nodes, is_divided = list[Node](), node in self._divided_nodes
            for is_undivided, node_run in groupby(node.children, self._is_undivided):
                group = tuple(node_run)
                is_lexeme = is_undivided and not is_divided and self.is_regular(*group)
                built_nodes += (
                    [self._read(self._group(node, group))] if is_lexeme else map(self._read, group)
                )
            return type(node)(tuple(built_nodes))
        if isinstance(node, grammar_nodes.RepeatNode):
            return grammar_nodes.RepeatNode(self._read(node.child), node.min_count, node.max_count)
        return node

    def _is_undivided(self, node: Node) -> bool:
        return node not in self._divided_nodes and self.is_regular(node)

    def _group(self, node: SequenceNode | ChoiceNode, children: tuple[Node, ...]) -> Node:
        """Return a node of node's type over `children`, or the only child; equal children give the same object."""
        if len(children) == 1:
            return children[0]
        return self._group_nodes.setdefault(children, type(node)(children))

    def _lexeme_node(self, node: Node) -> Node:
        """Return the lexeme that reads a regular node; nodes with equal regular expressions have one lexeme."""
        if isinstance(node, SequenceNode) and not node.children:
            return node
        lexeme_index = self._numbers.setdefault(node_regex(node, self.texts), len(self.nodes))
        if lexeme_index == len(self.nodes):
            self.nodes.append(node)
            self._equal_nodes.append([])
        self._equal_nodes[lexeme_index].append(node)
        return grammar_nodes.LexemeNode(lexeme_index, self._node_heads(node)[1])

    def _node_heads(self, node: Node) -> grammar_nodes.Heads:
        return grammar_nodes.node_heads(node, self._heads)

    def definitions(self) -> list[str]:
        """Return the lexemes in llguidance's notation, as `T0: /[ab]+/`; a lexeme never matches the empty text."""
        return [
            f"T{index}: /{node_regex(node, self.texts)}/{NONEMPTY if self._node_heads(node)[1] else ''}"
            for index, node in enumerate(self.nodes)
        ]

    def head_characters(self, lexemes: set[int]) -> str:
        """Return a regular expression of the characters with which lexemes, given by their indices, can begin."""
        leaves = (leaf for n in lexemes - {ANY_CHAR} for leaf in self._node_heads(self.nodes[n])[0])
        ranges = [r for leaf in leaves if isinstance(leaf, CharSet) for r in leaf.code_ranges]
        ranges += grammar_nodes.ALL_CODES if ANY_CHAR in lexemes else ()
        return node_regex(CharSet(grammar_nodes.merge_ranges(ranges)), {})


def _format_grammar(lexeme_rules: grammar_nodes.GrammarRules, definitions: list[str]) -> str:
    names = {name: f"r{index}" for index, name in enumerate(lexeme_rules)}
    lines = [f"{names[name]}: {_format_node(rule, names)}" for name, rule in lexeme_rules.items()]
    return "\n".join([f"{LARK_HEADER}start: {names['root']}", *lines, *definitions, ""])


def _format_node(node: Node, names: Mapping[str, str], group: str = "(", space: str = " ") -> str:
    """Format a node over lexemes in llguidance's notation; or a regular node as a regular expression, see `node_regex`.

    names         what stands for each rule, by rule name
    group, space  what opens a group, and what separates the parts of a sequence
    """
    if isinstance(node, CharSet):
        ranges = (f"\\x{{{a:x}}}-\\x{{{last_code:x}}}" for a, last_code in node.code_ranges)
        return f"[{''.join(ranges)}]"
    if isinstance(node, grammar_nodes.LexemeNode):
        return f"T{node.lexeme_index}{'?' * node.empty}"
    if isinstance(node, grammar_nodes.RuleReference):
        return names[node.rule_name]
    if isinstance(node, grammar_nodes.TokenNode):
        return f"<[{'^' * node.is_negated}{node.token_id}]>"
    parts = [_format_node(part, names, group, space) for part in parts_of(node)]
    if isinstance(node, grammar_nodes.RepeatNode):
        max_count = "" if node.max_count is None else node.max_count
        return f"{group}{parts[0]}){{{node.min_count},{max_count}}}"
    separator = f"{space}|{space}" if isinstance(node, ChoiceNode) else space
    return f"{group}{separator.join(parts)})" if parts or not space else '""'


def node_regex(node: Node, texts: Mapping[str, str]) -> str:
    """Format a regular node as a regular expression of Rust; `texts` has the expressions of the rules that it names."""
    return _format_node(node, texts, "(?:", "")
