"""Look-alikes of each layout of vLLM's attention selector, before and after the patch."""

FUNCTION = '''\
# vllm-eagle3-patch: draft-attention-backend
def own_backend_of_draft_model(backend, use_mla):
    """The backend that is set; for a draft model without MLA not the one of its MLA target."""
    if backend is None or use_mla or "MLA" not in str(backend):
        return backend
    from vllm.config import get_current_vllm_config
    from vllm.logger import init_logger

    vllm_config = get_current_vllm_config()
    speculative_config = vllm_config.speculative_config
    if getattr(speculative_config, "method", None) != "eagle3":
        return backend
    # While a draft model is built, this is still the config of its target.
    if not vllm_config.model_config.use_mla:
        return backend
    own_backend = getattr(speculative_config, "attention_backend", None)
    if own_backend is None:
        init_logger(__name__).info_once(
            "EAGLE-3: the draft model chooses its own attention backend, "
            "its target's %s is for MLA only",
            backend,
        )
    return own_backend


'''

# As in vLLM 0.17.0 to 0.27.1.
ARGUMENT = '''"""A selector look-alike."""

from functools import cache


def get_attn_backend(head_size, use_mla=False):
    """Select which attention backend to use."""
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()

    # The platform has the last word.
    return _cached_get_attn_backend(
        backend=vllm_config.attention_config.backend,
        selector_config=(head_size, use_mla),
    )


@cache
def _cached_get_attn_backend(backend, selector_config):
    return current_platform.get_attn_backend_cls(backend, *selector_config)


def get_mamba_attn_backend(mamba_type):
    return mamba_config.attention_config.backend
'''
ARGUMENT_AFTER = ARGUMENT.replace("def get_attn", f"{FUNCTION}def get_attn", 1).replace(
    "backend=vllm_config.attention_config.backend,",
    "backend=own_backend_of_draft_model(vllm_config.attention_config.backend, use_mla),",
)

# As in vLLM 0.13.0 to 0.16.0.
ASSIGNED = ARGUMENT.replace(
    "backend=vllm_config.attention_config.backend,", "backend=backend_enum,"
).replace(
    "get_current_vllm_config()\n",
    "get_current_vllm_config()\n    backend_enum = vllm_config.attention_config.backend\n",
)
ASSIGNED_AFTER = ASSIGNED.replace("def get_attn", f"{FUNCTION}def get_attn", 1).replace(
    "backend_enum = vllm_config.attention_config.backend",
    "backend_enum = own_backend_of_draft_model(vllm_config.attention_config.backend, use_mla)",
)

# As in vLLM 0.28.0 to 0.33.0.
BY_KIND = ARGUMENT.replace(
    "backend=vllm_config.attention_config.backend,", "backend=backend,"
).replace(
    "get_current_vllm_config()\n",
    """get_current_vllm_config()
    attention_config = vllm_config.attention_config
    backend = attention_config.backend  # of all kinds
    if attention_config.backend_per_kind:
        backend = attention_config.backend_per_kind.get(use_mla, backend)
""",
)
BY_KIND_AFTER = BY_KIND.replace("def get_attn", f"{FUNCTION}def get_attn", 1).replace(
    "= attention_config.backend  #",
    "= own_backend_of_draft_model(attention_config.backend, use_mla)  #",
)

# As in vLLM 0.11.1 to 0.12.0.
ENVIRONMENT = '''"""A selector look-alike."""

from functools import cache


def get_attn_backend(head_size, use_mla=False):
    return _cached_get_attn_backend(head_size=head_size, use_mla=use_mla)


@cache
def _cached_get_attn_backend(head_size, use_mla=False):
    selected_backend = None
    if forced_attn_backend is not None:
        selected_backend = forced_attn_backend
    else:
        # Check the environment variable
        backend_by_env_var: "str | None" = envs.VLLM_ATTENTION_BACKEND
        if backend_by_env_var is not None:
            selected_backend = AttentionBackendEnum[backend_by_env_var]
    return current_platform.get_attn_backend_cls(selected_backend, head_size, use_mla)
'''
ENVIRONMENT_AFTER = ENVIRONMENT.replace("@cache\n", f"{FUNCTION}@cache\n").replace(
    "= envs.VLLM_ATTENTION_BACKEND",
    "= own_backend_of_draft_model(envs.VLLM_ATTENTION_BACKEND, use_mla)",
)

LAYOUTS_OF_VLLM = {
    "the environment, 0.11.1 to 0.12.0": (ENVIRONMENT, ENVIRONMENT_AFTER),
    "the config, assigned, 0.13.0 to 0.16.0": (ASSIGNED, ASSIGNED_AFTER),
    "the config, an argument, 0.17.0 to 0.27.1": (ARGUMENT, ARGUMENT_AFTER),
    "the config, by kind, 0.28.0 to 0.33.0": (BY_KIND, BY_KIND_AFTER),
}
