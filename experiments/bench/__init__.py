"""Benchmarks, one per file; each prints its numbers (docs/benchmarks.md).

a sampler       decode.py (decode_sglang.py), decode_steps.py, prefill.py, groups.py
a learner       learner.py, logprobs.py (logprobs_case.py, _jax, _torch), packing.py
both            publish.py, saves.py, grpo_step.py (beside TRL and google-tunix)
whole runs      gpu_run.py, several_gpus.py (several/), curves.py
the plan        plan_gpu.py, plan_no_gpu.py, plan_cases.py, plan_compiler.py, tpu_compile.py
the runtime     start.py, buffer.py, tracing.py, check.py
the doctor      broken_runs.py (run_library/)
rewards         verifiers.py (verifier_cases.py, verifier_forms.py)

Shared by several: shapes.py (models of known shapes), packed_rows.py (batches), ranks.py (learners
of several processes), sampler_config.py (flags).
"""
