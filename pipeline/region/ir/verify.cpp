// The typing rules of each op and of whole programs.
#include <algorithm>
#include <optional>
#include <set>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {
namespace {

class Rules {
 public:
  Rules(const std::string& block, const std::string& name, const Op& op, const std::vector<Value>& operands)
      : prefix_("[" + block + "] " + name + " = " + std::string(name_of(op.code)) + ": "),
        op_(op),
        operands_(operands) {}

  Result<Value> run(const Shape& wanted, ElementType type) {
    const std::size_t count = operands_.size(), least = operands_of(op_.code);
    // A bias and an addend; a norm's weight.
    const bool one_more = op_.code == OpCode::kScaledLinear || op_.code == OpCode::kRmsNorm;
    const std::size_t most = least + (op_.code == OpCode::kLinear ? 2 : one_more ? 1 : 0);
    if (count < least || (count > most && op_.code != OpCode::kJoin))
      return wrong("has " + std::to_string(count) + " operands; it must have " + std::to_string(least) +
                   (most > least ? " to " + std::to_string(most) : ""));
    for (const Value& v : operands_)
      if (v.shape.empty()) return wrong("operand %" + v.name + " has no axes");
    const bool mixed = op_.code == OpCode::kRope || op_.code == OpCode::kScaledLinear ||
                       op_.code == OpCode::kQuantizeRow || op_.code == OpCode::kAttention;
    for (std::size_t i = 1; i < count && !mixed; ++i) {
      if (op_.code == OpCode::kGateResidual && i == 1 && operands_[i].type == ElementType::kF32) continue;
      if (auto e = same_type(i)) return *e;
    }
    Value made{.type = operands_[0].type, .shape = operands_[0].shape};
    switch (op_.code) {
      case OpCode::kLinear: return linear(made);
      case OpCode::kScaledLinear: return scaled_linear(made);
      case OpCode::kRowScale: {
        auto checked = row(made);
        if (!checked) return checked.error();
        made.type = ElementType::kF32;
        made.shape.back() = 1;
        return made;
      }
      case OpCode::kQuantizeRow:
        if (auto e = has_row_scales(1, made.shape)) return *e;
        made.type = ElementType::kF8;
        return row(made);
      case OpCode::kRmsNorm:
        if (count > 1 && operands_[1].shape != Shape{made.shape.back()})
          return wrong("the weight is " + text_of(operands_[1].shape) + "; it must be " + text_of({made.shape.back()}));
        return row(made);
      case OpCode::kRope: return rope(made);
      case OpCode::kModulate:
      case OpCode::kMul:
      case OpCode::kAdd:
        for (std::size_t i = 1; i < count; ++i)
          if (auto e = broadcasts(i)) return *e;
        return row(made);
      case OpCode::kGateResidual:
        if (auto e = broadcasts(1)) return *e;
        if (operands_[2].shape != made.shape)
          return wrong("the branch is " + text_of(operands_[2].shape) + "; it must be " + text_of(made.shape));
        return row(made);
      case OpCode::kLayerNorm:
      case OpCode::kGeluTanh:
      case OpCode::kGeluErf:
      case OpCode::kSilu: return row(made);
      case OpCode::kCast: made.type = type; return row(made);
      case OpCode::kAttention: return attention(made);
      case OpCode::kReshape:
        if (!(elements_of(wanted) == elements_of(made.shape)))
          return wrong(text_of(made.shape) + " cannot be reshaped to " + text_of(wanted) +
                       ": the numbers of elements differ");
        made.shape = wanted;
        return made;
      case OpCode::kSlice: return slice(made);
      case OpCode::kPermute: return permute(made);
      case OpCode::kJoin: return join(made);
    }
    return wrong("is not an op");
  }

  Error wrong(const std::string& what) const { return invalid_argument(prefix_ + what); }

 private:
  std::optional<Error> same_type(std::size_t i) const {
    if (operands_[i].type == operands_[0].type) return {};
    return wrong("%" + operands_[i].name + " is " + std::string(name_of(operands_[i].type)) + " and %" +
                 operands_[0].name + " is " + std::string(name_of(operands_[0].type)) + "; cast one of them");
  }
  // Every axis equal or 1, the last one equal; as many axes as the first operand, or just the last.
  std::optional<Error> broadcasts(std::size_t i) const { return broadcasts(i, operands_[i].shape); }
  std::optional<Error> broadcasts(std::size_t i, const Shape& from) const {
    const Shape& to = operands_[0].shape;
    bool fits = from.back() == to.back() && (from.size() == to.size() || from.size() == 1);
    if (fits && from.size() == to.size())
      for (std::size_t a = 0; a < to.size(); ++a) fits = fits && (from[a] == to[a] || from[a] == Dim(1));
    if (fits) return {};
    return wrong("%" + operands_[i].name + " is " + text_of(operands_[i].shape) + ", which does not broadcast to " +
                 text_of(to) + "; each axis must be equal or 1, the last one equal");
  }
  // Row ops unroll over the last axis: it must be a number.
  Result<Value> row(Value made) const {
    if (!made.shape.back().is_static() || made.shape.back().value() < 1)
      return wrong("the last axis is " + made.shape.back().text() + "; it must be a number, not a symbol");
    if ((op_.code == OpCode::kLayerNorm || op_.code == OpCode::kRmsNorm) && !(op_.eps > 0))
      return wrong("eps must be above 0");
    return made;
  }
  Result<Value> linear(Value made) const {
    const Shape &x = made.shape, &weight = operands_[1].shape;
    if (weight.size() != 2 && weight.size() != 3)
      return wrong("the weight is " + text_of(weight) + "; it must be [out, in] or [batch, out, in]");
    if (weight.size() == 3 && !(x.size() > 2 && x[0] == weight[0]))
      return wrong("x is " + text_of(x) + " and the weight " + text_of(weight) + "; x must start with " +
                   weight[0].text() + ", followed by its rows");
    const Dim &out = weight[weight.size() - 2], &in = weight.back();
    if (!(x.back() == in))
      return wrong("x is " + text_of(x) + " and the weight " + text_of(weight) + "; x must end in " + in.text());
    return with_bias(made, out, 2);
  }
  // The result [.., out]; operand `bias` and the addend after it are optional.
  Result<Value> with_bias(Value made, const Dim& out, std::size_t bias) const {
    made.shape.back() = out;
    if (operands_.size() > bias && operands_[bias].shape != Shape{out})
      return wrong("the bias is " + text_of(operands_[bias].shape) + "; it must be " + text_of({out}));
    if (operands_.size() > bias + 1 && operands_[bias + 1].shape != made.shape)
      return wrong("the addend is " + text_of(operands_[bias + 1].shape) + "; it must be " + text_of(made.shape));
    return made;
  }
  std::optional<Error> has_row_scales(std::size_t i, Shape of) const {
    of.back() = 1;
    if (operands_[i].type == ElementType::kF32 && operands_[i].shape == of) return {};
    return wrong("the scales %" + operands_[i].name + " are " + std::string(name_of(operands_[i].type)) + " " +
                 text_of(operands_[i].shape) + "; they must be f32 " + text_of(of));
  }
  Result<Value> scaled_linear(Value made) const {
    const Value &weight = operands_[1], &scales = operands_[3];
    if (made.type != ElementType::kF8 || weight.type != ElementType::kF8) return wrong("x and the weight must be f8");
    if (weight.shape.size() != 2 || !(weight.shape[1] == made.shape.back()))
      return wrong("x is " + text_of(made.shape) + " and the weight " + text_of(weight.shape) +
                   "; it must be [out, in], and x must end in `in`");
    if (auto e = has_row_scales(2, made.shape)) return *e;
    if (scales.type != ElementType::kF32 || scales.shape != Shape{weight.shape[0]})
      return wrong("the weight's scales are " + std::string(name_of(scales.type)) + " " + text_of(scales.shape) +
                   "; they must be f32 " + text_of({weight.shape[0]}));
    made.type = operands_[4].type;
    if (operands_.size() > 5 && operands_[5].type != made.type)
      return wrong("the addend is " + std::string(name_of(operands_[5].type)) + "; it must have the bias's type, " +
                   std::string(name_of(made.type)));
    return with_bias(made, weight.shape[0], 4);
  }
  Result<Value> rope(Value made) const {
    const Value& table = operands_[1];
    if (table.type != ElementType::kF32) return wrong("the table %" + table.name + " must be f32");
    const Dim &width = made.shape.back(), &period = table.shape.back();
    Shape repeated = table.shape;
    repeated.back() = width;
    if (auto e = broadcasts(1, repeated)) return *e;
    if (!width.is_static() || width.value() % 2 != 0)
      return wrong("the last axis is " + width.text() + "; pairs need an even number");
    if (!period.is_static() || period.value() < 2 || period.value() % 2 != 0 || width.value() % period.value() != 0)
      return wrong("the table's last axis is " + period.text() + "; it must be an even divisor of " + width.text());
    return row(made);
  }
  Result<Value> attention(Value made) const {
    if (auto e = same_type(1)) return *e;
    if (made.type != ElementType::kF8)
      if (auto e = same_type(2)) return *e;
    made.type = operands_[2].type;
    if (made.shape.size() < 3)
      return wrong("q is " + text_of(made.shape) + "; it must be [.., tokens, heads, head size]");
    for (std::size_t i = 1; i < 3; ++i) {
      Shape expected = made.shape;
      // Cross attention: keys and values have the same number of tokens, which may differ from that of the queries.
      expected[expected.size() - 3] =
          operands_[1].shape.size() == expected.size() ? operands_[1].shape[expected.size() - 3] : Dim(0);
      if (operands_[i].shape != expected)
        return wrong("%" + operands_[i].name + " is " + text_of(operands_[i].shape) + ", q is " + text_of(made.shape) +
                     "; they must be equal in all axes except the tokens");
    }
    if (op_.token_stride != 0 &&
        !(made.shape[made.shape.size() - 2].is_static() && made.shape.back().is_static() &&
          op_.token_stride >= made.shape[made.shape.size() - 2].value() * made.shape.back().value()))
      return wrong("the token stride is " + std::to_string(op_.token_stride) + "; it must be 0 or at least the " +
                   text_of(made.shape) + "'s heads times head size");
    if (op_.across_ranks && (made.shape.size() != 4 || operands_[1].shape != made.shape))
      return wrong("is across ranks; q, k and v must be [batch, tokens, heads, head size]");
    return made;
  }
  Result<Value> slice(Value made) const {
    if (op_.axis < 0 || op_.axis >= static_cast<int>(made.shape.size()))
      return wrong("axis " + std::to_string(op_.axis) + " of " + text_of(made.shape) + " does not exist");
    const Dim& whole = made.shape[static_cast<std::size_t>(op_.axis)];
    if (!op_.start.never_negative() || !op_.length.never_negative() ||
        !(whole - op_.start - op_.length).never_negative())
      return wrong("the slice of length " + op_.length.text() + " from " + op_.start.text() + " may exceed " +
                   whole.text());
    made.shape[static_cast<std::size_t>(op_.axis)] = op_.length;
    return made;
  }
  Result<Value> permute(Value made) const {
    std::vector<int> sorted = op_.order;
    std::sort(sorted.begin(), sorted.end());
    bool whole = sorted.size() == made.shape.size();
    for (std::size_t i = 0; whole && i < sorted.size(); ++i) whole = sorted[i] == static_cast<int>(i);
    if (!whole) return wrong("the order must contain each axis of " + text_of(made.shape) + " once");
    Shape shape;
    for (int axis : op_.order) shape.push_back(made.shape[static_cast<std::size_t>(axis)]);
    made.shape = shape;
    return made;
  }
  Result<Value> join(Value made) const {
    if (op_.axis < 0 || op_.axis >= static_cast<int>(made.shape.size()))
      return wrong("axis " + std::to_string(op_.axis) + " of " + text_of(made.shape) + " does not exist");
    const auto axis = static_cast<std::size_t>(op_.axis);
    for (std::size_t i = 1; i < operands_.size(); ++i) {
      Shape expected = made.shape;
      if (operands_[i].shape.size() == expected.size()) expected[axis] = operands_[i].shape[axis];
      if (operands_[i].shape != expected)
        return wrong("%" + operands_[i].name + " is " + text_of(operands_[i].shape) + " and %" + operands_[0].name +
                     " is " + text_of(operands_[0].shape) + "; they must be equal in all axes except " +
                     std::to_string(op_.axis));
      made.shape[axis] = made.shape[axis] + operands_[i].shape[axis];
    }
    return made;
  }

  const std::string prefix_;
  const Op& op_;
  const std::vector<Value>& operands_;
};

}  // namespace

Result<Value> infer(const std::string& block, const std::string& name, const Op& op, const std::vector<Value>& operands,
                    const Shape& wanted, ElementType type) {
  Rules rules(block, name, op, operands);
  auto made = rules.run(wanted, type);
  if (!made) return made.error();
  made->name = name;
  made->kind = ValueKind::kResult;
  return made;
}

Result<void> verify(const Program& program) {
  const auto wrong = [&](const std::string& what) { return invalid_argument("[" + program.block + "] " + what); };
  std::set<std::string> names;
  std::set<int> known;
  for (std::size_t i = 0; i < program.values.size(); ++i) {
    const Value& value = program.values[i];
    if (value.name.empty() || !names.insert(value.name).second)
      return wrong("the name %" + value.name + " is empty or used twice; names must be unique");
    if (value.kind != ValueKind::kResult) known.insert(static_cast<int>(i));
  }
  for (const Op& op : program.ops) {
    if (op.output < 0 || op.output >= static_cast<int>(program.values.size()) || known.contains(op.output))
      return wrong(std::string(name_of(op.code)) + " has no result");
    const Value& made = program.value(op.output);
    std::vector<Value> operands;
    for (int input : op.inputs) {
      if (!known.contains(input))
        return wrong(made.name + " = " + std::string(name_of(op.code)) + ": an operand is computed later or never");
      operands.push_back(program.value(input));
    }
    auto inferred = infer(program.block, made.name, op, operands, made.shape, made.type);
    if (!inferred) return inferred.error();
    if (inferred->type != made.type || inferred->shape != made.shape)
      return wrong(made.name + " = " + std::string(name_of(op.code)) + ": is declared " +
                   std::string(name_of(made.type)) + " " + text_of(made.shape) + "; it must be " +
                   std::string(name_of(inferred->type)) + " " + text_of(inferred->shape));
    known.insert(op.output);
  }
  if (program.outputs.empty()) return wrong("has no outputs");
  for (int output : program.outputs)
    if (!known.contains(output) || program.value(output).kind != ValueKind::kResult)
      return wrong("an output is not the result of an op");
  return {};
}

}  // namespace ditfleet::region
