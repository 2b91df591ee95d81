// Keeps passwords on a command line out of `ps`.
#pragma once

namespace ditfleet {

// Overwrites the password of every URL (scheme://user:password@…) in the arguments with asterisks. Call it once they
// have been copied.
void hide_passwords(int argc, char** argv);

}  // namespace ditfleet
