"""The LightLLM start arguments read by the adapter and named in docs/identity.md exist."""

import dataclasses
from types import SimpleNamespace

import gpu_agent.identity.lightllm as ours


def _fields() -> set[str]:
    from lightllm.server.core.objs.start_args_type import StartArgs

    return {field.name for field in dataclasses.fields(StartArgs)} | set(vars(StartArgs))


def test_lightllm_reads_arguments_that_exist() -> None:
    read = {*ours._ARGUMENTS, *ours._HYBRID_ARGUMENTS, *ours._FILES}
    read |= {
        "model_dir",
        "enable_rl",
        "enable_multimodal",
        "disable_vision",
        "disable_audio",
        "run_mode",
    }
    read |= {"tp", "dp", "nnodes", "node_rank", "mtp_draft_model_dir"}
    assert read <= _fields()


def test_lightllm_serves_no_lora() -> None:
    assert not [name for name in _fields() if "lora" in name]


def test_rope_variables_are_in_lightllms_source() -> None:
    """Read the source, because importing a model needs a GPU."""
    import lightllm

    (root,) = lightllm.__path__
    with open(f"{root}/models/llama/model.py") as source:
        text = source.read()
    assert all(name in text for name in ours.VARIABLES)


def test_images_of_two_servers_get_the_same_token_ids() -> None:
    """Verify that different images get the same page hashes on different servers.

    Token ids only count images, whatever they show, and a page's hash covers only token ids. That
    is why a server with images does not start.
    """
    from lightllm.server.embed_cache.impl.naive_memory_cache import InMemoryCache
    from lightllm.utils.kv_cache_utils import compute_token_list_hash

    prompts = []
    for _ in range(2):
        server = InMemoryCache.__new__(InMemoryCache)
        server.args, server.use_config_server = SimpleNamespace(run_mode="normal"), False
        server.token_id_range_start = server.token_id_range_end = 0
        server._check_and_set_new_id_range(64)
        image = range(server.token_id_range_start, server.token_id_range_start + 64)
        prompts.append(compute_token_list_hash([1, 2, 3, *image, 4, 5, 6], 16))
    assert prompts[0] == prompts[1]
