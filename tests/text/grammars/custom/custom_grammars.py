"""Grammars in Lark as clients of custom tools write them, by what they have in them."""

ARITHMETIC = r"""
start: expr
expr: term (("+" | "-") term)*   // sums
term: factor (("*" | "/") factor)*
factor: NUMBER | "(" expr ")" -> inner
NUMBER: /[0-9]+/ ("." /[0-9]{1,2}/)?
%ignore /[ \t]+/
"""
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SQL = r"""
start: "select"i WS columns WS "from"i WS CNAME [WS "where"i WS condition] ";"
columns: "*" | CNAME (_COMMA CNAME)*
condition: CNAME ("=" | "<" | ">" | "<>") (SIGNED_INT | QUOTED)
QUOTED: "'" /[^'\n]*/ "'"
_COMMA: "," " "?
%import common (CNAME, SIGNED_INT)
%import common.WS
"""
JSON_LIKE = r"""
?start: value
?value: object | list | STRING | SIGNED_NUMBER | "true" | "null"
list: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
STRING: "\"" (/[^"\\\x00-\x1f]/ | ESCAPE)* "\""
ESCAPE: "\\" ("\"" | "\\" | "n" | /u[0-9a-f]{4}/)
%import common.SIGNED_NUMBER
%import common.WS
%ignore WS
"""
UNICODE = r"""
start: WORD (" " WORD)* END
WORD: /\w+/ | /\p{Lu}\p{Greek}*/ | /[^\s\w]/
END: /[\n\r\x01\x1e\t😀]/
"""
RECORDS = r"""
start: record ("\u001e" record)*
record: field ("\u001f" field)*
field: /[^\x1e\x1f]*/
"""
RANGES = r"""
start: HEX~2..3 ("é".."ü")+ "k"i{2} [TAIL] "\\" ("x" | "\n" | "\t"){,3} /"*/ QUOTES{2,}
HEX: "0".."9" | "a".."f"
TAIL: /.{2}/s & ~/[a-z].|\n./
QUOTES: /["\\\n]/
"""
MARKUP = r"""
start: element
element: "<" NAME ">" (TEXT element?)? "</" NAME ">"
NAME: /[a-z]+/
TEXT: /[^<]+/
"""
COMMENTED = r"""
# a comment, "with" /marks/
start: line+
line: A "\n" | B "\n"   // ends
    | "\"quoted\"" "\n"
A: /a"?/
B: "b" B2? | /"(?i:x|é)"/
B2: "\\" | "\n"
"""
GRAMMARS = {name.lower(): value for name, value in list(vars().items()) if name.isupper() and isinstance(value, str)}
