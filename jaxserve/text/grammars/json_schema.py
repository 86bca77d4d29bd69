"""Reads JSON schemas (drafts 4 to 2020-12) as shapes.

Keywords that ask nothing of any value are passed over: notes, formats that aren't known, null, and values without an
effect. A keyword that asks something that can't be held is refused with its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from jaxserve.text.grammars.custom.custom_text import MAX_CHARACTERS, CustomText
from jaxserve.text.grammars.json_algebra import Algebra
from jaxserve.text.grammars.json_shapes import (
    ANY,
    ANY_KEYS,
    ANY_SHAPES,
    NEVER,
    Boolean,
    LarkText,
    List,
    Null,
    Number,
    Object,
    OpenKeys,
    Ref,
    Schema,
    Shape,
    Text,
)
from jaxserve.text.grammars.numbers import Bound
from jaxserve.text.grammars.pattern_parser import as_rust, found_in
from jaxserve.text.grammars.patterns import Node
from jaxserve.text.grammars.text_formats import text_format

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TEXTS = ("minLength", "maxLength", "pattern", "format")
_OF_LISTS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems")
_OF_OBJECTS = (
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required",
    "minProperties", "maxProperties", "propertyNames",
)  # fmt: skip
_OF_TYPES = frozenset(("type", *_OF_NUMBERS, *_OF_TEXTS, *_OF_LISTS, *_OF_OBJECTS))
# Keywords that ask nothing, or that other keywords read.
_WITHOUT_EFFECT: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "$dynamicRef": lambda *_: False,
    "$recursiveRef": lambda *_: False,
    "not": lambda value, _: value is False,
    "if": lambda _, schema: not {"then", "else"} & schema.keys(),
    "then": lambda value, schema: "if" not in schema or value in (True, {}),
    "else": lambda value, schema: "if" not in schema or value in (True, {}),
    "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: "contains" not in schema or value == 0,
    "maxContains": lambda _, schema: "contains" not in schema,
    "dependentSchemas": lambda value, _: value == {},
    "unevaluatedItems": lambda value, _: value in (True, {}),
    "unevaluatedProperties": lambda value, schema: (
        value in (True, {}) or not schema.keys() & {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
    ),
}
_MAX_REFERENCES = 20
# Each schema of a `oneOf` is compared with all others.
_MAX_COMPARED = 64
_DRAFT_3 = "`true` or `false` is draft 3; later ones list the required names beside `properties`"


class SchemaReader:
    """Reads one document. `unheld` lists the places of `uniqueItems` that can't be held: these are left to the client.

    With `closes_objects`, objects have only the properties that their schema names.
    """

    def __init__(self, document: Any, *, closes_objects: bool = False) -> None:
        self._document = document
        self._closes_objects = closes_objects
        self._read: dict[str, Schema] = {}
        self._named: dict[str, Any] = {}
        self._find_names(document)
        self.unheld: list[str] = []
        self.algebra = Algebra(self.look_up)

    def read(self, schema: Any, where: str = "") -> Schema:
        """Return the shapes of a schema at a place of the document. Raises `ValueError` that names the place."""
        if schema is True:
            return ANY
        if schema is False:
            return NEVER
        if isinstance(schema, CustomText):
            return self._custom(schema, where)
        if not isinstance(schema, Mapping):
            raise ValueError(f"{where}: a JSON schema is an object, true or false".removeprefix(": "))
        given = {
            name: value
            for name, value in schema.items()
            if name == "const" or (value is not None and not _is_without_effect(name, value, schema))
        }
        for name in sorted(_WITHOUT_EFFECT.keys() & given.keys()):
            if name != "unevaluatedProperties" or not _WITHOUT_EFFECT[name](given[name], given):
                raise ValueError(f"{_at(where, name)} can't be held")
        found = ANY
        of_types = False
        for name, value in given.items():
            if name in _OF_TYPES and not of_types:
                of_types = True
                found = self.algebra.both(found, self._of_types(given, where))
            elif name in _APPLIED:
                try:
                    found = self.algebra.both(found, _APPLIED[name](self, value, _at(where, name)))
                except RecursionError:
                    raise ValueError(f"{_at(where, name)}: it is nested too deep") from None
        return found

    def _custom(self, schema: CustomText, where: str) -> Schema:
        if (size := len(schema.definition)) > MAX_CHARACTERS:
            raise ValueError(f"{where}: the grammar has {size} characters; at most {MAX_CHARACTERS} are supported")
        if schema.syntax == "lark":
            return (LarkText(schema.definition, where),)
        try:
            return (Text(patterns=(as_rust(schema.definition),), where=where),)
        except ValueError as error:
            raise ValueError(f"{where}: the regular expression can't be held: {error}") from None

    def _find_names(self, value: Any) -> None:
        """Note what `$id` and `$anchor` name."""
        pending = [value]
        while pending:
            one = pending.pop()
            if isinstance(one, Mapping):
                for key, name in (("$id", one.get("$id", one.get("id"))), ("$anchor", one.get("$anchor"))):
                    if isinstance(name, str):
                        self._named.setdefault(f"#{name}" if key == "$anchor" else name, one)
                pending += one.values()
            elif isinstance(one, list):
                pending += one

    def _target(self, pointer: str) -> Any:
        base, _, path = pointer.partition("#")
        if path and not path.startswith("/"):
            return self._named.get(f"#{path}")
        return _find(self._document if not base else self._named.get(base, self._named.get(f"{base}#")), path)

    def look_up(self, ref: Ref) -> Schema:
        """Return the schema that a reference leads to."""
        if ref.pointer not in self._read:
            where = ref.pointer.partition("#")[2].strip("/").replace("/", ".")
            self._read[ref.pointer] = self.read(self._target(ref.pointer), where)
        return self._read[ref.pointer]

    def _reference(self, pointer: Any, where: str) -> Schema:
        if not isinstance(pointer, str) or self._target(pointer) is None:
            raise ValueError(f"{where}: {pointer!r} is not in this document")
        return (Ref(pointer),)

    def _all_of(self, schemas: Any, where: str) -> Schema:
        found = ANY
        for schema in self._each(schemas, where):
            found = self.algebra.both(found, schema)
        return found

    def _any_of(self, schemas: Any, where: str) -> Schema:
        options = [*self._each(schemas, where)]
        return ANY if ANY in options else tuple(dict.fromkeys(shape for option in options for shape in option))

    def _one_of(self, schemas: Any, where: str) -> Schema:
        options = [one for one in self._each(schemas, where) if not self.algebra.is_empty(one)]
        if len(options) > _MAX_COMPARED:
            raise ValueError(f"{where}: more than {_MAX_COMPARED} alternatives can't be held, so `anyOf` is needed")
        for number, one in enumerate(options):
            for other in options[:number]:
                if not self.algebra.are_disjoint(one, other):
                    raise ValueError(f"{where}: a value might match two of these, so `anyOf` is needed")
        return tuple(shape for option in options for shape in option)

    def _each(self, schemas: Any, where: str) -> Iterator[Schema]:
        if not isinstance(schemas, list) or not schemas:
            raise ValueError(f"{where} must be a list of schemas")
        return (self.read(one, f"{where}.{number}") for number, one in enumerate(schemas))

    def _enum(self, values: Any, where: str) -> Schema:
        if not isinstance(values, list):
            raise ValueError(f"{where} must be a list of values")
        texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
        truths = frozenset(value for value in values if isinstance(value, bool))
        found: Schema = (Text(values=texts, where=where),) if texts else ()
        found += (Boolean(truths),) if truths else ()
        others = (value for value in values if not isinstance(value, (str, bool)))
        return (*found, *dict.fromkeys(self._const(value, where)[0] for value in others))

    def _const(self, value: Any, where: str) -> Schema:
        if value is None:
            return (Null(),)
        if isinstance(value, bool):
            return (Boolean(frozenset((value,))),)
        if isinstance(value, str):
            return (Text(values=(value,), where=where),)
        if isinstance(value, (int, float)):
            bound = Bound(_decimal(value, where))
            return (Number(isinstance(value, int), bound, bound),)
        if isinstance(value, list):
            items = tuple(self._const(item, where) for item in value)
            return (List(items, NEVER, len(items), len(items)),)
        if isinstance(value, Mapping):
            members = tuple((name, self._const(one, where)) for name, one in value.items())
            return (Object(members, (OpenKeys((), NEVER),), tuple(value)),)
        raise ValueError(f"{where}: {value!r} is no JSON value")

    def _dependent(self, needed: Any, where: str) -> Schema:
        """Return the objects that have no key of a name, or all the others that it needs."""
        found = ANY
        for name, others in needed.items() if isinstance(needed, Mapping) else ():
            if not isinstance(others, list):
                raise ValueError(f"{where}.{name} can't be held")
            absent = {"properties": {name: False}}
            present = {"required": [name, *others]}
            found = self.algebra.both(found, self._any_of([absent, present], where))
        return found

    def _of_types(self, given: Mapping[str, Any], where: str) -> Schema:
        """Return the shapes that the keywords of single types allow."""
        types = given.get("type", list(_TYPES))
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, list) or not set(names) <= {*_TYPES, "integer"}:
            raise ValueError(f"{_at(where, 'type')}: {types!r} should be among {', '.join((*_TYPES, 'integer'))}")
        found: list[Shape] = []
        for name in dict.fromkeys(names):
            if name == "integer" and "number" in names:
                continue
            found += _READERS[name](self, given, where)
        return ANY if tuple(found) == ANY_SHAPES else tuple(found)

    def _number(self, given: Mapping[str, Any], where: str, *, integer: bool = False) -> Schema:
        ends: dict[str, Bound] = {}
        for name in ("minimum", "maximum"):
            exclusive = given.get(f"exclusive{name.capitalize()}", False)
            end = None if name not in given else Bound(_decimal(given[name], _at(where, name)), exclusive is True)
            if not isinstance(exclusive, bool):
                other = Bound(_decimal(exclusive, _at(where, f"exclusive{name.capitalize()}")), open=True)
                tighter = max if name == "minimum" else min
                end = other if end is None or tighter(end.value, other.value) == other.value else end
            if end is not None:
                ends[name] = end
        multiple = None
        if "multipleOf" in given:
            multiple = Fraction(_decimal(given["multipleOf"], _at(where, "multipleOf")))
            if multiple <= 0:
                raise ValueError(f"{_at(where, 'multipleOf')} must be more than 0")
            if multiple.numerator == 1 and integer:  # every integer is one of 1, 1/2, 1/3, …
                multiple = None
            elif multiple == 1:
                multiple, integer = None, True
        return (Number(integer, ends.get("minimum"), ends.get("maximum"), multiple, where),)

    def _integer(self, given: Mapping[str, Any], where: str) -> Schema:
        return self._number(given, where, integer=True)

    def _text(self, given: Mapping[str, Any], where: str) -> Schema:
        found: list[Node] = []
        if "pattern" in given:
            place = _at(where, "pattern")
            if not isinstance(given["pattern"], str):
                raise ValueError(f"{place} must be a text")
            try:
                found.append(found_in(given["pattern"]))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        known = text_format(given["format"]) if isinstance(given.get("format"), str) else None
        found += [] if known is None else [known]
        least, most = _count(given, "minLength", where) or 0, _count(given, "maxLength", where)
        return (Text(least, most, tuple(found), None, where),)

    def _list(self, given: Mapping[str, Any], where: str) -> Schema:
        items, prefix = given.get("items", True), given.get("prefixItems", [])
        if isinstance(items, list):  # up to draft 2019-09
            prefix, items = items, given.get("additionalItems", True)
        if not isinstance(prefix, list):
            raise ValueError(f"{_at(where, 'prefixItems')} must be a list of schemas")
        least, most = _count(given, "minItems", where) or 0, _count(given, "maxItems", where)
        first = tuple(self.read(one, f"{_at(where, 'prefixItems')}.{number}") for number, one in enumerate(prefix))
        rest = self.read(items, _at(where, "items"))
        unique = given.get("uniqueItems", False) is True
        return (List(first, rest, least, most, unique, where),)

    def _object(self, given: Mapping[str, Any], where: str) -> Schema:
        named, by_pattern = given.get("properties", {}), given.get("patternProperties", {})
        for name, value in (("properties", named), ("patternProperties", by_pattern)):
            if not isinstance(value, Mapping):
                raise ValueError(f"{_at(where, name)} must be an object")
        others = given.get("additionalProperties", given.get("unevaluatedProperties", True))
        if self._closes_objects and "properties" in given and "additionalProperties" not in given:
            others = False
        place = _at(where, "patternProperties")
        found: list[tuple[Node, Schema]] = []
        for pattern, schema in by_pattern.items():
            try:
                node = found_in(pattern)
            except ValueError as error:
                raise ValueError(f"{place}.{pattern}: {error}") from None
            found.append((node, self.read(schema, f"{place}.{pattern}")))
        keys = OpenKeys(tuple(found), self.read(others, _at(where, "additionalProperties")))
        keys = ANY_KEYS if keys == ANY_KEYS else keys
        required = given.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError(f"{_at(where, 'required')} must be a list of names; {_DRAFT_3}")
        least, most = _count(given, "minProperties", where) or 0, _count(given, "maxProperties", where)
        bare = Object((), (keys,), where=where)
        by_keys = Object((), (OpenKeys(keys.patterns, ANY),))
        properties = {
            name: self.algebra.both(
                self.read(schema, _at(_at(where, "properties"), name)), self.algebra.value_of(by_keys, name)
            )
            for name, schema in named.items()
        }
        for name in required:
            if name not in properties:
                properties[name] = self.algebra.value_of(bare, name)
        names = self._key_names(given.get("propertyNames", True), _at(where, "propertyNames"))
        return (Object(tuple(properties.items()), (keys,), tuple(dict.fromkeys(required)), least, most, names, where),)

    def _key_names(self, schema: Any, where: str) -> tuple[Text, ...]:
        """Return the texts that all keys must match."""
        shapes = [one for one in self.algebra.shapes(self.read(schema, where)) if isinstance(one, Text)]
        if len(shapes) > 1 and all(one.values is not None for one in shapes):
            shapes = [Text(values=tuple(value for one in shapes for value in one.values or ()))]
        if len(shapes) > 1:
            raise ValueError(f"{where}: alternatives can't be held")
        if not shapes:
            return (Text(values=()),)
        return () if shapes == [Text()] else (shapes[0],)


_APPLIED: dict[str, Callable[[SchemaReader, Any, str], Schema]] = {
    "$ref": SchemaReader._reference,
    "allOf": SchemaReader._all_of,
    "anyOf": SchemaReader._any_of,
    "oneOf": SchemaReader._one_of,
    "enum": SchemaReader._enum,
    "const": SchemaReader._const,
    "dependentRequired": SchemaReader._dependent,
    "dependencies": SchemaReader._dependent,
}
_READERS: dict[str, Callable[[SchemaReader, Mapping[str, Any], str], Schema]] = {
    "null": lambda *_: (Null(),),
    "boolean": lambda *_: (Boolean(),),
    "number": SchemaReader._number,
    "integer": SchemaReader._integer,
    "string": SchemaReader._text,
    "array": SchemaReader._list,
    "object": SchemaReader._object,
}


def resolved(schema: Any, document: Any) -> Any:
    """Follow the references of a schema within a document; one that leads elsewhere stays as it is."""
    for _ in range(_MAX_REFERENCES):
        pointer = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            break
        found = _find(document, pointer[1:])
        if found is None:
            break
        schema = found
    return schema


def _find(document: Any, path: str) -> Any:
    """Return what a JSON pointer leads to, or None."""
    found = document
    for part in path.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_without_effect(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    known = _WITHOUT_EFFECT.get(name)
    return known is not None and name != "unevaluatedProperties" and known(value, schema)


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _decimal(value: Any, where: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{where}: {value!r} should be a number")
    # Others may be compared with integers of any size, so that the digits of a float as it is written are too few.
    return Decimal(repr(value)) if isinstance(value, int) or abs(value) < 2**53 else Decimal(int(value))


def _count(given: Mapping[str, Any], name: str, where: str) -> int | None:
    """Return a number of characters, items or keys."""
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise ValueError(f"{_at(where, name)}: {value!r} should be a whole number, not below 0")
    return int(value)
