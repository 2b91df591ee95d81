# cmake -DOUTPUT=… -DHEADER=… -DNAMESPACE=… "-DFILES=symbol=path|symbol=path" -P embed.cmake
# Writes a C++ file that defines each symbol as a std::string_view of its file's text.
set(text "// Generated from the files named in CMakeLists.txt.\n#include \"${HEADER}\"\n\nnamespace ${NAMESPACE} {\n")
string(REPLACE "|" ";" FILES "${FILES}")
foreach(pair IN LISTS FILES)
  string(REGEX MATCH "^([^=]+)=(.+)$" _ "${pair}")
  set(symbol ${CMAKE_MATCH_1})
  file(READ "${CMAKE_MATCH_2}" content)
  string(APPEND text "\nconst std::string_view ${symbol} = R\"embedded(${content})embedded\";\n")
endforeach()
string(APPEND text "\n}  // namespace ${NAMESPACE}\n")
file(WRITE "${OUTPUT}" "${text}")
