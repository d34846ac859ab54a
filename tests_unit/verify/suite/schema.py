"""Checks JSON against the published schema, by what it uses of the standard; every key must be listed."""

import json
from pathlib import Path

import hyper_parallel

SCHEMA = json.loads(
    (Path(hyper_parallel.__file__).parent / "verify" / "schemas" / "reports-1.schema.json").read_text(encoding="utf-8")
)
_TYPES = {"string": str, "boolean": bool, "number": (int, float), "integer": int, "array": list, "object": dict,
          "null": type(None)}  # fmt: skip
_KNOWN = {"$ref", "anyOf", "const", "enum", "type", "items", "required", "properties", "additionalProperties",
          "description"}  # fmt: skip


def problems(value, schema, where="report"):
    """Return what of a value is not as its schema says, and keys that the schema does not list."""
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "$ref" in schema:
        return problems(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    if "anyOf" in schema:
        found = [problems(value, each, where) for each in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    if "const" in schema or "enum" in schema:
        return [] if value in schema.get("enum", [schema.get("const")]) else [f"{where} is {value!r}"]
    return _of_type(value, schema, where)


def _of_type(value, schema, where):
    """Return what of a value is not of the type that its schema says."""
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    matching = [each for each in types if isinstance(value, _TYPES[each])]
    if not matching or (isinstance(value, bool) and "boolean" not in types):
        return [f"{where} is a {type(value).__name__}, not {' or '.join(types)}"]
    if isinstance(value, list):
        return [
            line for place, each in enumerate(value) for line in problems(each, schema["items"], f"{where}[{place}]")
        ]
    if not isinstance(value, dict) or set(schema) <= {"type", "description"}:
        return []
    known, rest = schema.get("properties", {}), schema.get("additionalProperties")
    found = [f"{where} has no {key}" for key in schema.get("required", ()) if key not in value]
    for key, each in value.items():
        if key in known or rest is not None:
            found += problems(each, known.get(key, rest), f"{where}.{key}")
        else:
            found.append(f"{where}.{key} is not in the schema")
    return found


def problems_of(document, name):
    """Return what of a report is not as the definition ``name`` says."""
    return problems(document, SCHEMA["$defs"][name])
