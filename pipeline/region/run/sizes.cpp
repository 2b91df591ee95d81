#include "pipeline/region/run/sizes.h"

#include "pipeline/device/failure.h"

namespace ditfleet::region {
namespace {

std::string shape_text(const at::Tensor& t) {
  std::string out = "[";
  for (std::int64_t n : t.sizes()) out += (out.size() == 1 ? "" : ", ") + std::to_string(n);
  return out + "]";
}

}  // namespace

Sizes sizes_of(const Program& program, const std::vector<at::Tensor>& inputs, bool any_type) {
  const auto order = program.inputs();
  const auto refuse = [&](const std::string& what) {
    pipeline::fail(Code::kInvalidArgument, "[" + program.block + "] " + what);
  };
  if (inputs.size() != order.size())
    refuse("has " + std::to_string(inputs.size()) + " inputs; it must have " + std::to_string(order.size()));
  Sizes sizes;
  // Takes single symbols from activations first, then from adapters, whose batch may be 1. Then compares everything.
  for (const ValueKind source : {ValueKind::kActivation, ValueKind::kAdapter, ValueKind::kResult})
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Value& value = program.value(order[i]);
      const at::Tensor& t = inputs[i];
      if (any_type && value.kind == ValueKind::kParameter && !t.defined()) continue;  // of a linear computed elsewhere
      if (!t.defined() || t.dim() != static_cast<std::int64_t>(value.shape.size()))
        refuse("%" + value.name + " is " + (t.defined() ? shape_text(t) : "missing") + "; it must be " +
               text_of(value.shape));
      if (!any_type && t.scalar_type() != scalar_type(value.type))
        refuse("%" + value.name + " is " + c10::toString(t.scalar_type()) + "; it must be " +
               std::string(name_of(value.type)));
      for (std::size_t a = 0; a < value.shape.size(); ++a) {
        const Dim& d = value.shape[a];
        const std::int64_t n = t.size(static_cast<std::int64_t>(a));
        const bool may_broadcast =
            n == 1 && (value.kind == ValueKind::kTable || (value.kind == ValueKind::kAdapter && a == 0));
        if (source != ValueKind::kResult) {
          std::vector<std::string> names;
          d.add_symbols_to(names);
          if (names.size() == 1 && d == Dim::symbol(names[0]) && value.kind == source) sizes.try_emplace(names[0], n);
        } else if (d.evaluate(sizes) != n && !may_broadcast) {
          refuse("%" + value.name + " is " + shape_text(t) + "; it must be " + text_of(value.shape) + ", whose " +
                 d.text() + " is " + std::to_string(d.evaluate(sizes)) + " according to the activations");
        }
      }
    }
  return sizes;
}

}  // namespace ditfleet::region
