"""What multiplies matrices, chosen as a kernel is compiled: vector FMA for every dtype, AMX for bfloat16."""

import functools

from numba.extending import overload

from . import panels
from . import products_amx as amx
from . import products_fma as fma


def choice(with_fma, with_amx):
    """A function `(lanes, ...)` that Numba compiles as one of two with the same arguments, by `lanes.products`."""

    @functools.wraps(with_fma.py_func)
    def chosen(*args):
        raise NotImplementedError("only kernels call this")

    @overload(chosen)
    @functools.wraps(with_fma.py_func)
    def choose(lanes, *args):
        return (with_amx if lanes.products == "amx" else with_fma).py_func

    return chosen


add_key_gradient = choice(fma.add_key_gradient, amx.add_key_gradient)
add_query_gradient = choice(fma.add_query_gradient, amx.add_query_gradient)
add_value_gradient = choice(fma.add_value_gradient, amx.add_value_gradient)
clear_weights = choice(fma.clear_weights, amx.clear_weights)
delta_pass = choice(fma.delta_pass, amx.delta_pass)
dot_panel = choice(fma.dot_panel, amx.dot_panel)
end_products = choice(fma.end_products, amx.end_products)
exp2_weight = choice(fma.exp2_weight, amx.exp2_weight)
keep_weights = choice(fma.keep_weights, amx.keep_weights)
mix_values = choice(fma.mix_values, amx.mix_values)
pack_for_backward = choice(fma.pack_key_tile, amx.pack_for_backward)
pack_for_forward = choice(fma.pack_key_tile, amx.pack_for_forward)
pack_query_panel = choice(panels.pack_query_panel, amx.pack_query_panel)
pack_rows = choice(fma.pack_rows, amx.pack_rows)
place_for_backward = choice(fma.place_tile, amx.place_for_backward)
place_for_forward = choice(fma.place_tile, amx.place_for_forward)
set_bad_keys_aside = choice(fma.set_bad_keys_aside, amx.set_bad_keys_aside)
set_bad_values_aside = choice(fma.set_bad_values_aside, amx.set_bad_values_aside)
softmax_panel = choice(fma.softmax_panel, amx.softmax_panel)
start_products = choice(fma.start_products, amx.start_products)
weight_panels = choice(fma.weight_panels, amx.weight_panels)
