"""Where Hydra's configuration meets the frozen dataclasses that the code reads.

Every group node and every command's root is typed by a dataclass that stands beside the class it configures, so a typo
or a wrong type in an override dies while composing, with the key and the class named.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Config = TypeVar("Config")

_STORE = ConfigStore.instance()


def register(name: str, schema: type, group: str | None = None) -> None:
    """Makes a dataclass available to a YAML's defaults list as `name`."""
    node = OmegaConf.structured(schema)
    _thaw(node)
    _STORE.store(group=group, name=name, node=node, provider="draftsmith")


def _thaw(node: DictConfig) -> None:
    """Lifts the read-only flag that OmegaConf puts on frozen dataclasses: overrides are merged into this node."""
    node._set_flag("readonly", None)
    for key in node:
        child = None if OmegaConf.is_missing(node, key) else node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _thaw(child)


def parse(node: DictConfig, schema: type[Config]) -> Config:
    """The frozen dataclass of a composed configuration.

    Raises:
        ValueError: a key that the class does not have (Hydra's `+key=value` gets past its own check), or a number that
            is not finite (nan gets past every comparison with a bound).
    """
    _refuse_unknown_keys(node, "")
    _refuse_not_finite(OmegaConf.to_container(node), "")
    parsed = OmegaConf.to_object(node)
    if not isinstance(parsed, schema):
        raise ValueError(f"the configuration is a {type(parsed).__name__}, not a {schema.__name__}")
    return parsed


def restore(schema: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """The frozen dataclass of values that `dataclasses.asdict` gave, typed and checked as an override would be.

    Args:
        where: names the place the values were read from, for the error.

    Raises:
        ValueError: a key that the class does not have, or a value of the wrong type.
    """
    node = OmegaConf.structured(schema)
    _thaw(node)
    try:
        node.merge_with(values)
        return parse(node, schema)
    except OmegaConfBaseException as error:
        raise ValueError(f"{where} does not fit {schema.__name__}: {str(error).splitlines()[0]}") from error


def _refuse_unknown_keys(node: Any, prefix: str) -> None:
    if not isinstance(node, DictConfig) or node._is_none():
        return
    schema = OmegaConf.get_type(node)
    if is_dataclass(schema):
        known = schema.__dataclass_fields__
        for key in node:
            if key not in known:
                raise ValueError(f"{prefix}{key!s}: {schema.__name__} has no such key; it has {', '.join(known)}")
    for key in node:
        if not OmegaConf.is_missing(node, key):
            _refuse_unknown_keys(node._get_node(key), f"{prefix}{key!s}.")


def _refuse_not_finite(value: Any, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}={value} must be a finite number")
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        _refuse_not_finite(child, f"{key}.{name}" if key else str(name))


def command(config_name: str, schema: type[Config]) -> Callable[[Callable[[Config], None]], Callable[[], None]]:
    """Makes a function of a parsed configuration into a command line: Hydra's overrides, --help and --cfg.

    A ValueError is what a user did wrong: it is printed without a traceback, exit code 1.
    """

    def decorate(run: Callable[[Config], None]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path="pkg://draftsmith.configs", config_name=config_name)
        def composed(node: DictConfig) -> None:
            try:
                run(parse(node, schema))
            except ValueError as error:
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    raise
                print(f"error: {error}", file=sys.stderr)
                sys.exit(1)

        return composed

    return decorate
