"""The error tree: one root, picklable, with a stable kind and a hint."""

import pickle

import pytest

import reef
from reef import errors

TREE = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls):
    """An error arrives in another process with class, message, kind, hint and facts."""
    error = cls("object wal/1 is damaged", hint="Run verify", object="wal/1", offset=17)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.kind, copy.hint) == (error.message, error.kind, error.hint)
    assert copy.context == {"object": "wal/1", "offset": 17}
    assert str(copy) == "object wal/1 is damaged. Run verify"


def test_all_errors_have_one_root():
    """Every error derives from ReefError."""
    assert all(issubclass(cls, errors.ReefError) for cls in TREE)


def test_errors_that_are_also_builtin():
    """The usual except-clauses work."""
    assert issubclass(errors.NotFoundError, KeyError)
    assert issubclass(errors.InvalidInputError, ValueError)


def test_not_found_prints_like_the_others():
    """KeyError would print its message in quotes."""
    assert str(errors.NotFoundError("no object k")) == "no object k"


def test_the_tree_at_the_top_of_the_file_is_the_tree():
    """The drawing names each class, and only those."""
    drawn = [word for word in errors.__doc__.split() if word.endswith("Error")]
    assert sorted(set(drawn) - {"KeyError)", "ValueError)", "ReefError"}) == sorted(
        cls.__name__ for cls in TREE if cls is not errors.ReefError
    )


def test_kinds_are_only_ever_added():
    """Programs match on kinds: these were published and stay. Add new ones here."""
    published = (
        "conflict fenced outcome_unknown unavailable timeout throttled short_read disk_full "
        "not_found collected invalid_input invalid_key invalid_range invalid_url "
        "invalid_option bucket_missing access_denied refused_by_store unsupported_by_store "
        "not_exclusive other_cas not_picklable forked condition_failed closed corruption "
        "unsupported_format internal not_durable dropped renamed log_forked changed_winner "
        "register_restored wrong_checkpoint"
    )
    assert [kind.value for kind in errors.ErrorKind] == published.split(" ")


@pytest.mark.parametrize("module", [reef, errors])
def test_public_names_are_sorted_and_real(module):
    """__all__ is the public face: nothing missing, nothing twice, in order."""
    assert module.__all__ == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_former_name_of_error_kinds_works_with_a_warning():
    """`Kind` was documented; it is the same class."""
    with pytest.warns(DeprecationWarning, match="ErrorKind"):
        assert errors.Kind is errors.ErrorKind
    with pytest.warns(DeprecationWarning, match="ErrorKind"):
        assert reef.Kind is reef.ErrorKind
