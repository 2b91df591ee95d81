#include "shared/safetensors/dtype.h"

#include <array>
#include <cstddef>

namespace ditfleet::safetensors {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int bits;
};

constexpr std::array<Row, 20> kRows = {{
    {DType::kBool, "BOOL", 8},      {DType::kF4, "F4", 4},          {DType::kF6E2M3, "F6_E2M3", 6},
    {DType::kF6E3M2, "F6_E3M2", 6}, {DType::kU8, "U8", 8},          {DType::kI8, "I8", 8},
    {DType::kF8E4M3, "F8_E4M3", 8}, {DType::kF8E5M2, "F8_E5M2", 8}, {DType::kF8E8M0, "F8_E8M0", 8},
    {DType::kI16, "I16", 16},       {DType::kU16, "U16", 16},       {DType::kF16, "F16", 16},
    {DType::kBF16, "BF16", 16},     {DType::kI32, "I32", 32},       {DType::kU32, "U32", 32},
    {DType::kF32, "F32", 32},       {DType::kC64, "C64", 64},       {DType::kF64, "F64", 64},
    {DType::kI64, "I64", 64},       {DType::kU64, "U64", 64},
}};

constexpr bool rows_follow_enum() {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<std::size_t>(kRows[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_follow_enum());

}  // namespace

std::string_view dtype_name(DType dtype) { return kRows[static_cast<std::size_t>(dtype)].name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

int dtype_bits(DType dtype) { return kRows[static_cast<std::size_t>(dtype)].bits; }

}  // namespace ditfleet::safetensors
