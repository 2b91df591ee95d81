// The fields of a job as flags of a command line. Pure, thread safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/fields.h"
#include "shared/job/spec.h"

namespace ditfleet::job {

// What was typed, by field.
using FieldFlags = std::map<Field, std::string>;

// Adds a flag to a CLI11 command for each row of the table that has one, but for adapters: the commands read those
// differently. The prompt is required; with `positional_prompt` it may come without its flag. `texts` must outlive the
// parsing. As text: CLI11 saturates large integers and drops empty texts.
template <class Command>
void add_field_flags(Command& command, FieldFlags& texts, bool positional_prompt) {
  for (const Field field : kFields) {
    const FieldRow& row = field.row();
    if (row.flag.empty() || row.type == FieldType::kAdapters) continue;
    const bool prompt = field == Field("prompt");
    command
        .template add_option_function<std::string>(
            (prompt && positional_prompt ? "prompt," : "") + std::string(row.flag),
            [&texts, field](const std::string& text) { texts[field] = text; }, std::string(row.description))
        ->type_name(row.type == FieldType::kSize   ? "WxH"
                    : row.type == FieldType::kText ? "TEXT"
                                                   : "NUMBER")
        ->required(prompt);
  }
}

// The fields as a job's JSON, with the output format that the extension of the file `out` means; without an extension
// the model's default applies. kInvalidArgument names the flag: a text that is not UTF-8, no finite number where the
// field is one, an unknown extension. Bounds are left to parse_spec.
Result<json::object> body_of(const FieldFlags& texts, const std::string& out_flag, const std::string& out);

// Prefixes the message with the flag that sets the field at fault, if one does.
Error name_the_flag(Error error);

// NAME or NAME:SCALE, where SCALE follows the last colon. Nothing if it is not a number from -kMaxLoraScale to
// kMaxLoraScale. The scale is 1 if it is left out.
std::optional<LoraUse> parse_lora_flag(std::string_view text);

// "out.png" of 1 → "out.png"; of 3, the 2nd → "out-2.png" (`index` counts from 0).
std::string numbered_path(const std::string& path, int index, int count);

}  // namespace ditfleet::job
