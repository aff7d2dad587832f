"""Random programs on a device with streams."""

from hypothesis import given, settings

from tests.engine.test_fuzz_programs import Program, check, num_programs, programs

BACKEND = "cpu:gloo,cuda:nccl"  # the norm of offloaded gradients is summed on the host

some = settings(derandomize=not num_programs, deadline=None, max_examples=num_programs or 15)


@some
@given(programs("fully_shard", ((2,),)))
def test_any_program_computes_what_it_does_unsharded(program: Program) -> None:
    check(program, BACKEND)


@some
@given(programs("wrapper", ((2,),)))
def test_any_program_computes_what_it_does_unsharded_with_a_wrapper(program: Program) -> None:
    check(program, BACKEND)
