"""Lists every function that a platform must have, by facet, with the names of its parameters.

The names are fixed: existing trainers call them. Parameters beyond these are keyword-only and have defaults.
"""

from __future__ import annotations

__all__ = ["ATTRIBUTES", "MEMBERS", "PROPERTIES", "SELECTION"]

# Parameters in their order; ``*`` makes the following keyword-only.
MEMBERS: dict[str, dict[str, str]] = {
    "identity": {
        "get_rank": "",
        "get_global_rank": "group group_rank",
        "get_world_size": "",
        "get_group_local_rank": "group",
        "get_process_group_ranks": "group",
        "get_backend": "group",
    },
    "groups": {
        "init_process_group": "backend * init_method timeout world_size rank store pg_options device_id",
        "destroy_process_group": "group",
        "create_group": "rank_list",
        "_create_group": "rank_list",
        "get_created_group": "rank_list",
        "mark_created_groups": "process_group",
        "split_group": "parent_pg split_ranks timeout pg_options group_desc",
        "barrier": "group async_op device_ids",
    },
    "collectives": {
        "all_gather_into_tensor": "data group_info async_op",
        "all_reduce": "data group_info async_op",
        "broadcast": "data src group async_op",
        "reduce_scatter_tensor": "data group_info async_op",
        "all_to_all_single": "input_tensor output_shape group async_op",
        "isend": "tensor dst group tag",
        "irecv": "tensor src group tag",
        "all_gather_object": "object_list obj group",
        "send_object_list": "obj_list dst group",
        "recv_object_list": "obj_list src group",
    },
    "differentiable": {
        "differentiable_all_gather_concat": "data group concat_size concat_dim",
        "differentiable_all_to_all": "input_data output_shape group",
        "differentiable_all_reduce": "data op group",
        "differentiable_reduce_scatter": "data dev_num axis op group",
        "differentiable_all_to_all_single": "input_tensor input_splits output_splits group",
        "differentiable_all_to_all_single_async": "input_tensor input_splits output_splits group",
        "differentiable_async_a2a_wait": "x work out_perm group world_size concat_dim split_dim handle_box",
        "differentiable_sync_hook": "x hook_name coordinator",
        "p2p_exchange": "tensor peer_rank group",
    },
    "tensors": {
        "is_tensor": "obj",
        "get_op_name": "func",
        "chunk": "data split_dim split_size index",
        "cat": "tensors dim",
        "tensor_type_cast": "input_data cast_type",
        "cast_fp_tensor": "dtype x",
        "get_tensor_storage_size": "tensor",
        "get_element_size": "tensor",
        "arange": "start end step dtype device",
        "zeros": "size dtype device",
        "full_like": "tensor fill_value dtype",
        "empty_like": "tensor * dtype device pin_memory",
        "new_tensor": "tensor_shape tensor_type device",
        "set_tensor_requires_grad": "input_tensor",
        "tensor_to_numpy": "tensor",
        "str_to_dtype": "dtype_str",
        "list_to_size": "size_list",
        "tree_map": "fn tree",
        "apply_to_tensors": "fn container",
        "get_tensor_transform": "",
        "construct_strided_slice": "x begin end stride",
    },
    "modules": {
        "get_cell_construct": "cell",
        "get_cells_and_names": "cell",
        "parameters_dict": "cell",
        "search_parameter_by_name": "cell param_name",
        "update_parameter_by_name": "cell result new_param",
        "set_layout_into_parameter": "param layout",
        "get_param_local_shape": "param",
        "get_param_local_data": "param",
        "update_param_data": "param data",
        "load_into_param": "param data",
        "get_param_type_size": "param",
        "new_zero_parameter": "param_shape param_type requires_grad device",
        "init_parameters": "module stage_index",
        "init_on_device": "device include_buffers",
        "meta_device": "",
        "fully_sharded": "module options parameters",
        "replicated": "module options",
        "is_linear_module": "module",
        "is_embedding_module": "module",
        "register_forward_pre_hook": "module hook prepend with_kwargs",
        "register_full_backward_hook": "module hook prepend",
        "register_full_backward_pre_hook": "module hook prepend",
        "clip_grad_norm_": "parameters max_norm norm_type error_if_nonfinite foreach",
    },
    "runtime": {
        "new_stream": "",
        "get_stream_context": "",
        "get_current_stream": "",
        "new_event": "",
        "set_grad_reduce_handle": "handle post_process",
        "wait_grad_handle": "",
        "_process_current_handle": "",
        "no_grad": "",
        "profiler_record": "name",
        "get_symmetric_memory_handler": "",
    },
    "memory": {
        "checkpoint": "",
        "ckpt_wrapper": "module checkpoint_fn **checkpoint_fn_kwargs",
        "noop_context_fn": "",
        "create_selective_checkpoint_contexts": "policy_fn_or_list allow_cache_entry_mutation",
        "swap_wrapper": "module policy_fn",
        "async_save_on_cpu": "policy_fn",
    },
    "persistence": {
        "get_model_state_dict": "model * options",
        "save_checkpoint": "cell file_path ckpt_format",
        "load_checkpoint": "file_path ckpt_format",
    },
    "pipeline": {
        "micro_batch": "micro_batch_num args_batch_dim kwargs_batch_dim",
    },
}

# Members that are read, not called.
PROPERTIES = ("meta_device", "checkpoint", "noop_context_fn")

ATTRIBUTES = (
    "Tensor",
    "Parameter",
    "Module",
    "Function",
    "DTensorBase",
    "platform_type",
    "ones",
    "zeros",
    "empty",
    "full",
)

# Functions of ``hyper_parallel.platform.select``.
SELECTION = ("get_platform", "get_torch_platform", "get_mindspore_platform")
