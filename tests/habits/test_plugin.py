"""The plugin fails what checked nothing, lists what did not run, and believes the exit status."""

from __future__ import annotations

import pytest

from tests.habits import plugin


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs a file of tests under the plugin, in this process or one of its own."""

    def run(
        source: str, *options: str, apart: bool = False, platform: str = "cpu"
    ) -> pytest.RunResult:
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setenv("PYTHONPATH", str(plugin.LIST.parents[2]))
        pytester.makeini(
            "[pytest]\nenable_assertion_pass_hook = true\nmarkers =\n    gpu: needs one\n"
        )
        pytester.makepyfile(test_given="import pytest\n" + source)
        arguments = ("-p", "tests.habits.plugin", "-p", "no:cacheprovider", *options)
        if apart:
            return pytester.runpytest_subprocess(*arguments)
        return pytester.runpytest_inprocess(*arguments)

    return run


@pytest.mark.parametrize(
    "body",
    [
        "assert 1 + 1 == 2",
        "with pytest.raises(ValueError): int('x')",
        "with pytest.warns(UserWarning): import warnings; warnings.warn('so')",
        "import numpy as np; np.testing.assert_array_equal([1], [1])",
    ],
)
def test_each_kind_of_check_counts(run, body):
    run(f"def test_it():\n    {body}").assert_outcomes(passed=1)


def test_a_test_that_checked_nothing_fails(run):
    result = run("def test_it():\n    for one in []:\n        assert one")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*executed no assertion and no engine step*")
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_assertions_of_fixtures_and_of_the_test_before_do_not_count(run):
    source = """
    @pytest.fixture
    def made():
        assert True
    def test_first(): assert True
    def test_it(made): pass
    def test_last(made): assert True
    """
    run(_dedented(source)).assert_outcomes(passed=2, failed=1)


def test_a_step_of_an_engine_counts(run):
    source = """
    import sys, types
    class Core:
        def step(self): return True
    sys.modules["engine.core"] = types.SimpleNamespace(Core=Core)
    def test_it(): Core().step()
    """
    run(_dedented(source), apart=True).assert_outcomes(passed=1)


def test_a_listed_test_may_check_nothing_and_must_not_check():
    habits = plugin.Habits({"tests/test_x.py::test_it": "the call itself is the check"})
    habits._judge("tests/test_x.py::test_it")
    with pytest.raises(pytest.fail.Exception, match="no assertion and no engine step"):
        habits._judge("tests/test_x.py::test_other")
    habits._num_checks = 1
    with pytest.raises(pytest.fail.Exception, match="take its row away"):
        habits._judge("tests/test_x.py::test_it")


def test_skips_are_listed_by_what_was_missing(run):
    source = """
    def test_it(): pytest.skip("needs the wheel w")
    @pytest.mark.skipif(True, reason="needs the wheel w")
    def test_too(): assert True
    """
    result = run(_dedented(source))
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(
        ["*not run, for want of*", "needs the wheel w: 2", "  *::test_it", "  *::test_too"]
    )


def test_a_skip_without_a_reason_fails(run):
    result = run("def test_it(): pytest.skip()\n@pytest.mark.skip\ndef test_too(): assert True")
    result.assert_outcomes(failed=1, errors=1)  # the mark skips before the call
    result.stdout.fnmatch_lines("*name the missing resource*")


def test_nothing_is_skipped_where_all_must_run(run):
    source = 'import pytest\ndef test_it(): pytest.skip("needs the wheel w")'
    run(source).assert_outcomes(skipped=1)
    result = run(source, "--no-skips")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*--no-skips was given: needs the wheel w*")


def test_an_expected_failure_that_checks_nothing_is_not_hidden(run):
    source = "@pytest.mark.xfail(strict=True, reason='so')\ndef test_it(): pass"
    run(source).assert_outcomes(failed=1)


def test_the_exit_status_outranks_the_counts(run, pytester):
    pytester.makeconftest("def pytest_sessionfinish(session): session.exitstatus = 7")
    result = run("def test_it(): assert True")
    result.assert_outcomes(passed=1)
    assert result.ret == 7
    result.stdout.fnmatch_lines("exit status 7, whatever the counts say")


def test_a_process_that_dies_after_its_last_test_has_failed(run, pytester):
    pytester.makeconftest("import atexit, os\natexit.register(os._exit, 9)")
    result = run("def test_it(): assert True", apart=True)
    result.assert_outcomes(passed=1)
    assert result.ret == 9


def test_gpu_suites_are_left_out_on_a_cpu_and_listed(run):
    result = run("@pytest.mark.gpu\ndef test_it(): assert True\ndef test_too(): assert True")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["an NVIDIA GPU*: 1", "  *::test_it"])


def test_two_gpu_suites_in_one_process_are_refused(run, pytester):
    source = "import pytest\n@pytest.mark.gpu\ndef test_it(): assert True"
    pytester.makepyfile(test_other=source)
    result = run(source, platform="cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*2 GPU suites in one process (test_given.py, test_other.py)*")


def _dedented(source: str) -> str:
    return "\n".join(line[4:] for line in source.splitlines())
