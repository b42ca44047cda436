"""The earlier import path of the steps: methods of users name it."""

from __future__ import annotations

import warnings

import pytest

from lindt import errors
from lindt.client import training
from lindt.client.adaptations import base


@pytest.mark.parametrize("name", ["Initial", "global_step", "gradient_step", "initial_private", "sgd_step"])
def test_a_name_that_moved_is_found_with_a_warning_that_says_where(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"base\.{name} is deprecated; import it from lindt\.client\.training"):
        assert getattr(base, name) is getattr(training, name)


def test_the_check_of_a_word_is_among_the_errors() -> None:
    with pytest.warns(DeprecationWarning, match=r"import it from lindt\.errors"):
        assert base.require_choice is errors.require_choice


def test_a_name_that_never_was_there_is_an_attribute_error() -> None:
    with warnings.catch_warnings(), pytest.raises(AttributeError, match="no attribute 'global_stepp'"):
        base.global_stepp  # noqa: B018
