# cmake "-DPARTS=a.lua;b.lua" -DBUILD=4 -DOUT=library_text.cpp -P embed.cmake: the Function library as a C++ string, and
# its build number. A Function library is loaded whole; its parts share the local functions of those before them.
set(text "")
foreach(part IN LISTS PARTS)
  file(READ "${part}" one)
  string(APPEND text "${one}\n")
endforeach()
file(WRITE "${OUT}" "// Made from functions/*.lua by embed.cmake.\n#include \"shared/queue/library.h\"\n\nnamespace ditfleet::queue {\nstd::string_view library_text() {\n  return R\"DITFLEET(${text})DITFLEET\";\n}\nint library_build() { return ${BUILD}; }\n}  // namespace ditfleet::queue\n")
