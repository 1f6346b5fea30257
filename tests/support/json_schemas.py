"""Documents held against the schemas that are published."""

from functools import cache

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from moectl.cli.schemas import schema_of


def closed(schema):
    """`schema` whose objects have no other keys than those that it lists."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: closed(part) for name, part in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        parts.setdefault("additionalProperties", False)
    return parts


@cache
def validator(command, strict=True):
    """A validator of the command's documents; a strict one finds keys that the schema does not list."""
    schema = schema_of(command)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(closed(schema) if strict else schema)


def check(document):
    """Fails unless `document` is as its command's schema says, and has no key that the schema lacks."""
    errors = list(validator(document["command"]).iter_errors(document))
    deeper = [inner for error in errors for inner in (error.context or ())]
    says = [f"{error.json_path}: {error.message[-300:]}" for error in (best_match(errors), *deeper) if error]
    assert not errors, "\n".join([f"{document['command']} against its schema", *says])
