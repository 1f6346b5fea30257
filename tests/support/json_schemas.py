"""Documents held against the schemas that are published."""

from functools import cache

from jsonschema_rs import Draft202012Validator

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
    return Draft202012Validator(closed(schema) if strict else schema)


def sentences(errors):
    """What is wrong, with its place; of a value that fits none of several schemas, with each of them."""
    for error in errors:
        yield f"{'/'.join(map(str, error.instance_path))}: {error.message[-300:]}"
        for branch in getattr(error.kind, "context", ()):
            yield from sentences(branch)


def check(document):
    """Fails unless `document` is as its command's schema says, and has no key that the schema lacks."""
    wrong = list(sentences(validator(document["command"]).iter_errors(document)))
    assert not wrong, "\n".join([f"{document['command']} against its schema", *wrong])
