"""Write a protocol once, for threads and for asyncio.

A function of steps is a generator that yields each piece of I/O and gets its result:

    reply = yield connection.wire.call("lookup", request, deadline)

With a synchronous wire the expression has done the work already, and `run` only hands the result
back. With an asynchronous one it is a coroutine, which `run_async` awaits. Errors are raised at the
`yield` in both cases.
"""

from collections.abc import Callable, Generator
from typing import Any, Generic, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")
Steps = Generator[Any, Any, Result]


def run(steps: Steps[Result]) -> Result:
    """Run steps whose I/O is synchronous."""
    try:
        done = next(steps)
        while True:
            done = steps.send(done)
    except StopIteration as end:
        result: Result = end.value
        return result


async def run_async(steps: Steps[Result]) -> Result:
    """Run steps whose I/O is awaited; a cancellation is raised at the step that it stops."""
    try:
        step = next(steps)
        while True:
            try:
                done = await step
            except BaseException as error:  # noqa: BLE001 -- the steps raise it again
                step = steps.throw(error)
            else:
                step = steps.send(done)
    except StopIteration as end:
        result: Result = end.value
        return result


class Stepwise(Generic[Params, Result]):
    """A function of steps that runs synchronously if it is called.

    `steps` returns the generator, for `run_async`.
    """

    def __init__(self, steps: Callable[Params, Steps[Result]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Run the steps with synchronous I/O."""
        return run(self.steps(*args, **kwargs))
