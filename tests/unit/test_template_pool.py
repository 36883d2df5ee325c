"""The helper processes that the models of a gateway share for their chat templates."""

from __future__ import annotations

import asyncio
import time

import pytest
from neuronpipe.plans.plan.memory_budget import MAX_TEMPLATE_HELPERS, MIN_TEMPLATES_BYTES
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.templates import template_pool
from neuronpipe.services.gateway.templates.messages import ChatTurn
from neuronpipe.services.gateway.templates.template_jobs import PromptJob, TemplateError, TemplateSource, WrittenPrompt
from neuronpipe.services.gateway.templates.template_pool import TemplatePool
from neuronpipe.services.gateway.templates.template_process import prepare
from neuronpipe.services.untrusted import process
from neuronpipe.services.untrusted.async_helper import AsyncHelper

GOOD, HANGING = "{{ messages[0].content }}", "{{ 7 ** (7 ** 9) }}"


@pytest.fixture(autouse=True)
def _forks_with_a_short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pool, "WORK", prepare)
    monkeypatch.setattr(template_pool, "JOB_S", 1.0)


def job(text: str) -> bytes:
    return PromptJob(source=TemplateSource(text, "", ""), turns=[ChatTurn("user", "Hi")]).encoded()


def test_a_template_that_hangs_leaves_a_process_to_the_other_models() -> None:
    async def serve() -> None:
        pool = TemplatePool(MIN_TEMPLATES_BYTES)
        hanging = [asyncio.ensure_future(pool.run("hostile", job(HANGING))) for _ in range(3)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        for model in ("good", "better", "good"):
            assert WrittenPrompt.decoded(await pool.run(model, job(GOOD))).text == "Hi"
        assert time.monotonic() - began < 0.7
        with pytest.raises(TemplateError, match="longer than 1 s"):
            await hanging[0]
        pool.close()
        for future in hanging[1:]:
            future.cancel()

    asyncio.run(serve())


def test_hanging_templates_of_many_models_delay_a_good_one_by_a_limit_or_two() -> None:
    async def serve() -> None:
        pool = TemplatePool(MIN_TEMPLATES_BYTES)
        names = [f"hostile {number}" for number in range(MAX_TEMPLATE_HELPERS)]
        hanging = [asyncio.ensure_future(pool.run(name, job(HANGING))) for name in names for _ in range(2)]
        await asyncio.sleep(0.05)
        assert WrittenPrompt.decoded(await pool.run("good", job(GOOD))).text == "Hi"
        assert sum(future.done() for future in hanging) <= MAX_TEMPLATE_HELPERS
        pool.close()
        for future in hanging:
            future.cancel()

    asyncio.run(serve())


def test_jobs_behind_a_template_that_hangs_are_refused_when_they_have_waited_for_two_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def serve() -> None:
        monkeypatch.setattr(template_pool, "JOB_S", 0.3)
        monkeypatch.setattr(template_pool, "TURN_S", 0.6)
        pool = TemplatePool(MIN_TEMPLATES_BYTES)
        began = time.monotonic()
        results = await asyncio.gather(*(pool.run("hostile", job(HANGING)) for _ in range(40)), return_exceptions=True)
        assert time.monotonic() - began < 2.0
        busy = [one for one in results if isinstance(one, ApiError)]
        assert len(busy) >= 38
        assert {(one.status, one.code) for one in busy} == {(503, "templates_busy")}
        assert all(("retry-after", "1") in one.headers for one in busy)
        answers = await asyncio.gather(*(pool.run("good", job(GOOD)) for _ in range(200)))
        assert {WrittenPrompt.decoded(answer).text for answer in answers} == {"Hi"}
        pool.close()

    asyncio.run(serve())


def test_the_process_stays_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_S", 0.05)

    async def serve() -> None:
        helper = AsyncHelper(prepare, memory_bytes=MIN_TEMPLATES_BYTES)
        pids = set()
        for _ in range(2):
            assert WrittenPrompt.decoded(await helper.call(job(GOOD), 5)).text == "Hi"
            pids.add(helper.pid)
            await asyncio.sleep(0.3)
        assert len(pids) == 1
        helper.close()

    asyncio.run(serve())


def test_a_conversation_that_is_too_long_for_a_process_is_an_error_of_its_own() -> None:
    async def serve() -> None:
        pool = TemplatePool(MIN_TEMPLATES_BYTES)
        with pytest.raises(TemplateError, match="more than"):
            await pool.run("good", b"x" * (20 << 20))
        assert WrittenPrompt.decoded(await pool.run("good", job(GOOD))).text == "Hi"
        pool.close()

    asyncio.run(serve())
