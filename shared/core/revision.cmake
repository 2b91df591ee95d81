# cmake -DSOURCE=… -DOUTPUT=revision.cpp -P revision.cmake
# Writes the file only if the revision has changed. An archive without .git, or a machine without git, gives "unknown",
# unless DITFLEET_REVISION is set in the environment.
set(revision "$ENV{DITFLEET_REVISION}")
if(revision STREQUAL "" AND EXISTS "${SOURCE}/.git")
  execute_process(COMMAND git -C "${SOURCE}" rev-parse --short=12 HEAD
    OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed EQUAL 0)
    set(revision "")
  endif()
endif()
string(REGEX REPLACE "[^A-Za-z0-9._+-]" "" revision "${revision}")
if(revision STREQUAL "")
  set(revision unknown)
endif()
set(text "#include \"shared/core/revision.h\"\n\nnamespace ditfleet {\nconst char* const kRevision = \"${revision}\";\n}\n")
set(old "")
if(EXISTS "${OUTPUT}")
  file(READ "${OUTPUT}" old)
endif()
if(NOT old STREQUAL text)
  file(WRITE "${OUTPUT}" "${text}")
endif()
