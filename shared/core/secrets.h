// Files that contain secrets, and passwords on the command line.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet {

// Returns the file's text. Like ssh and PostgreSQL, it refuses a file that other users can read or could have written:
// the owner must be this process's user, with mode 0600 or less, or root, with mode 0640 or less. Blocks.
// kNotFound, kUnavailable (not readable), kInvalidArgument (wrong owner or mode); the message contains the path and the
// command that corrects it.
Result<std::string> read_secret_file(const std::string& path);

// Overwrites the password of every URL (scheme://user:password@…) in the arguments with asterisks. Call it once they
// have been copied.
void hide_passwords(int argc, char** argv);

}  // namespace ditfleet
